"""A program whose results have the same bits on every machine: what merges messages."""
