# `snakemake published --cores all`: tables that others published, and ours beside them.
rule published:
    input:
        "benchmarks/published.toml",
    output:
        "data/published/published.md",
        "data/published/published.csv",
    shell:
        "python -m benchmarks.published"
