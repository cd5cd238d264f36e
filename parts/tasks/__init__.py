"""Tasks: requests that the model scores, and standard tasks made of such requests."""
