"""The audit of a transcript: checks, replay, verdict, bundles."""
