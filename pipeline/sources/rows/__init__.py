"""Data of rows: token ids in columns, arrays, files, and what a workload gives."""
