# `snakemake compare --cores all`: the trainings of params/compare.toml, or of the file that
# `--config compare=FILE` names, and their table.
from pipeline.comparison import plan_file

COMPARED = Path(config.get("compare", plan_file.COMPARE_FILE))
PLAN = plan_file.plan_path(COMPARED)


checkpoint planned:
    output:
        str(PLAN),
    params:
        file=shlex.quote(str(COMPARED)),
    shell:
        "python -m pipeline compare {params.file} --plan"


rule trained:
    input:
        lambda wildcards: [ancient(str(path)) for path in plan_file.needed(PLAN, wildcards.name)],
    output:
        str(plan_file.result_path("{name}")),
    params:
        file=shlex.quote(str(COMPARED)),
    shell:
        "python -m pipeline compare {params.file} --training {wildcards.name}"


rule compare:
    input:
        lambda wildcards: [
            ancient(str(path)) for path in plan_file.results(Path(checkpoints.planned.get().output[0]))
        ],
    params:
        file=shlex.quote(str(COMPARED)),
    shell:
        "python -m pipeline compare {params.file} --table"
