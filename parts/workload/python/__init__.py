"""What is on the path of a worker, in the environment of a user's model."""
