"""What people read: the report, the model card, the summary, and their plots."""
