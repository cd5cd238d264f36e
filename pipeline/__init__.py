"""The stages of a Lockstep run and what they need. Every Snakemake job imports this: stay light."""
