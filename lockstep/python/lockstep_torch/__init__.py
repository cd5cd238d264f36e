"""A torch model's gradient, for `simulate` and for the worker of a user's model.

Imports torch and NumPy alone: a worker runs in the environment of a user, without Lockstep.
"""
