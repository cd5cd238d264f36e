"""What a user sees of a training in progress, and how its owner pauses it."""
