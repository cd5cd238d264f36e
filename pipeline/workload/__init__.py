"""A user's model in a process and an environment of its own."""
