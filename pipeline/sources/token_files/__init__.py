"""Locations whose files hold tokens as they stand: listed, chosen, fetched and checked."""
