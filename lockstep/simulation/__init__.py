"""`simulate`: the rounds that stage train takes, in Python, for any model that JAX can train."""
