"""What the lab does: it opens a run, gives its slots, signs addresses, and removes what is old."""
