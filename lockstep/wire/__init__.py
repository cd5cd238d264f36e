"""Messages as bytes, and hashes of messages and states."""
