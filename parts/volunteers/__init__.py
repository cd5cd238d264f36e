"""Peers of strangers, who share a store of objects and nothing else."""
