"""A run in a store: its links, and what follows from them."""
