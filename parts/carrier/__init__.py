"""Carriers: what brings a run's work to peers in processes of their own, and decides nothing."""
