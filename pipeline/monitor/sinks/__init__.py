"""The curves of a training in the trackers that people use: TensorBoard, W&B and MLflow."""
