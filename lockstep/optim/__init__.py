"""Optimizers that exchange little, each in its file; `optimizer` says what they have in common.

Imports nothing of the pipeline: with JAX and optax alone, this folder can be used elsewhere.
"""
