"""Whole transfers: into a store of contents, as streams, and of a repository on the hub."""
