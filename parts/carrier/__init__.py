"""Carriers: they bring work to peers in processes of their own, and decide nothing."""
