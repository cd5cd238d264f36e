"""What every stage shares: keys, artifacts, locks, devices, progress and pins."""
