# `snakemake compare --cores all`: the trainings of params/compare.toml, and their table.
from pipeline.comparison import plan_file

PLAN = plan_file.plan_path()


checkpoint planned:
    output:
        str(PLAN),
    shell:
        "python -m pipeline compare --plan"


rule trained:
    input:
        lambda wildcards: [ancient(str(path)) for path in plan_file.needed(PLAN, wildcards.name)],
    output:
        str(plan_file.result_path("{name}")),
    shell:
        "python -m pipeline compare --training {wildcards.name}"


rule compare:
    input:
        lambda wildcards: [
            ancient(str(path)) for path in plan_file.results(Path(checkpoints.planned.get().output[0]))
        ],
    shell:
        "python -m pipeline compare --table"
