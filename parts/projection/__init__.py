"""What a planned run would take at a scale that nobody has here: bytes, failures, hours."""
