"""Optimizers that exchange little: each is five pure functions (optimizer.py), each in its file."""
