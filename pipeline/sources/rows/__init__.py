"""Data whose rows are not tokens: arrays, files of any content, and what a workload gives."""
