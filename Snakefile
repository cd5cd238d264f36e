"""`snakemake train --cores all`: one rule for each stage of dvc.yaml. A bare `snakemake` runs them all."""
import shlex
import sys
from pathlib import Path

from lockstep.errors import LockstepError
from pipeline import joints
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import RUN_FILE, STAGES, Keys, needs

KEYS = Keys(Path(RUN_FILE))

try:
    for name in STAGES:  # no rule runs where only metrics/ was changed, as by a git checkout
        Paths(name, Path(RUN_FILE), Path()).publish()
        Paths(name, Path(RUN_FILE), Path()).check_pinned()
except LockstepError as error:  # without the stack of an exception
    sys.exit(f"error: {error}")


rule all:
    default_target: True
    input:
        [KEYS.made(name) for name in STAGES],


# A key holds all that a stage depends on, so times of files say nothing: `ancient`.
for name in STAGES:

    rule:
        name:
            name
        input:
            [ancient(KEYS.made(need)) for need in needs(name)],
        output:
            KEYS.made(name),
        log:
            f"logs/{name}.log",
        resources:  # of a cluster's job; not `threads`, or stages would wait for each other here
            **STAGES[name]["meta"],
        params:  # not `shell: stage["cmd"]`, which every rule would share: the loop's last
            cmd=STAGES[name]["cmd"],
        shell:
            "{params.cmd} 2>&1 | tee {log}"


for rules in sorted(joints.FOLDER.glob("*/rules.smk")):

    include: str(rules)
