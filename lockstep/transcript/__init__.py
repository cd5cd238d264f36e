"""The record of a run: written while training, read by the auditor."""
