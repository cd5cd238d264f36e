"""Shards into batches: which sequence is where, its bytes, and the checks of its ids."""
