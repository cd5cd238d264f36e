"""Makes each stage's outputs again from what is published, and says how each is known."""
