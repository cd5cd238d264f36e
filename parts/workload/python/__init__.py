"""The folder on a worker's path, in the environment of a user's model."""
