"""What also runs where JAX is not installed: this folder is on the path of a worker's process."""
