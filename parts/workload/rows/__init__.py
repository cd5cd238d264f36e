"""Rows that are arrays of examples or names of files: only a workload trains on these."""
