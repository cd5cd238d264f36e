"""What a library needs of the machine: its memory, its terminal, and how JAX is set there."""
