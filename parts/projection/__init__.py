"""What a planned large run would take: bytes, failures, hours."""
