"""Optimizers that exchange little, each in its file; `optimizer` says what they have in common."""
