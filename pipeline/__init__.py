"""The stages of a Lockstep run and their library. Every Snakemake job imports this: stay light."""

__version__ = "0.1.0"
