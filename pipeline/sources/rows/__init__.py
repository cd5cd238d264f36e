"""Data whose rows are no tokens: arrays, files of any content, and what a workload gives."""
