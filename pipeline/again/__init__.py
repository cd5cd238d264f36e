"""Each stage made again from what is published of a run, and how it is known to be so."""
