"""The curves of a training in the trackers that people use: TensorBoard and W&B."""
