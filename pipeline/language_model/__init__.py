"""A language model as what a run trains: its task, its loss on held-out text, its samples."""
