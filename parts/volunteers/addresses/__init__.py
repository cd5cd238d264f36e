"""Addresses that the lab signs ahead, by which a volunteer uses a store without credentials."""
