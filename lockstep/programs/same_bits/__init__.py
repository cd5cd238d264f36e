"""Programs whose results have the same bits on every CPU: they merge messages."""
