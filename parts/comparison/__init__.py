"""`snakemake compare`: methods side by side at equal tokens, bytes and simulated hours."""
