"""What all stages share: keys, artifacts, locks, devices, progress and pins."""
