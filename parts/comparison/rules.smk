# `snakemake compare --cores all`: the trainings of params/compare.toml, or of the file that
# `--config compare=FILE` names, and their table.
from parts.comparison import plan_file

COMPARED = Path(config.setdefault("compare", str(plan_file.COMPARE_FILE)))
try:
    PLAN = plan_file.plan_path(COMPARED)
except LockstepError as error:  # as in the Snakefile
    sys.exit(f"error: {error}")


checkpoint planned:
    output:
        str(PLAN),
    shell:
        "python -m pipeline compare {config[compare]:q} --plan"


# What trains has one result, whichever file names it. So the file is no parameter of the rule: as
# such it would have Snakemake train again what another comparison has, and forget the rest.
rule trained:
    input:
        lambda wildcards: [ancient(str(path)) for path in plan_file.result_paths(PLAN, wildcards.name)],
    output:
        str(plan_file.result_path("{name}")),
    shell:
        "python -m pipeline compare {config[compare]:q} --training {wildcards.name}"


rule compare:
    input:
        lambda wildcards: [
            ancient(str(path))
            for path in plan_file.result_paths(Path(checkpoints.planned.get().output[0]))
        ],
    shell:
        "python -m pipeline compare {config[compare]:q} --table"
