"""Audits of a run while it goes on."""
