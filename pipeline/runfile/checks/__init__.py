"""Checks across tables of a run file."""
