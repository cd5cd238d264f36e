"""What a publication is checked for: records, params from start to end, a sample of windows."""
