"""A user's own model: its process, and the programs of a run whose gradients it computes."""
