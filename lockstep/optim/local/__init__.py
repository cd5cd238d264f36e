"""Optimizers whose peers take several steps of their own between two exchanges."""
