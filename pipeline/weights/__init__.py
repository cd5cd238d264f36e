"""Params on disk, on the Hugging Face hub and in buckets."""
