"""A reader's check of a published run: each stage's outputs made again, and how each is known."""
