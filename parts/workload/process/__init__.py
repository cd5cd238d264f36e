"""The process of a workload: its start, what it is asked, and that nothing of it is left."""
