"""Where checkpoints are pushed to: a repository on the hub, or a folder of a bucket.

What no audit has accepted goes beside what one has: to the branch, or the folder, `unaudited`. So
do the params that end an epoch, which are pushed while training goes on.
"""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_text, writes
from lockstep.optim.optimizer import Tree
from lockstep.protocol.round import Round
from pipeline import runfile
from pipeline.runfile.psyche import destination
from pipeline.stage.artifacts import Paths
from pipeline.weights import bucket, hf, hub_model, model_folder
from pipeline.weights.model_folder import TrainedModel

log = logging.getLogger(__name__)

UNAUDITED = "unaudited"
UNAUDITED_CARD = """\
---
tags:
- {unaudited}
---

# Unaudited: step {step} of run {key}

These are the params at the end of epoch {epoch} of a training that goes on. No audit has looked at
them yet, so a peer that lied may be in them. What an audit accepted is on the main branch, or in
the folder above this one, once `lockstep push` has put it there.
"""


def push(
    checkpoint: runfile.CheckpointHub | runfile.CheckpointGcs,
    files: Mapping[str, Path],
    *,
    step: int,
    epoch: int,
    run: str,
    private: bool,
    audited: bool = True,
) -> runfile.CheckpointHub | runfile.CheckpointGcs:
    """Upload the files of a checkpoint, and return it with the version that it is read by.

    Files are by their names; a bucket takes those of the model, without folders. `step` is the last
    trained round, and `run` the key of the run's stage train. `private` concerns a repository that
    is created on the hub, and `audited` says whether an audit accepted the checkpoint.
    """
    if isinstance(checkpoint, runfile.CheckpointHub):
        message = f"Step {step} of run {run}"
        branch = "main" if audited else UNAUDITED
        if not audited:
            message = f"{message}, the end of epoch {epoch}: unaudited"
        revision = hub_model.push(
            files, checkpoint.repo_id, message, private=private, branch=branch
        )
        return checkpoint.model_copy(update={"revision": revision})
    prefix = checkpoint.prefix or ""
    if not audited:
        prefix = f"{prefix.rstrip('/')}/{UNAUDITED}".lstrip("/")
    model = [path for name, path in files.items() if "/" not in name]
    generation = bucket.push(model, checkpoint.bucket, prefix, step=step, epoch=epoch, run=run)
    return checkpoint.model_copy(update={"prefix": prefix or None, "generation": generation})


def push_epoch(run: runfile.Run, paths: Paths, params: Tree, last: Round) -> None:
    """Upload the params to the `[config] checkpointers`; a failure is only a warning.

    `paths` are those of the run's stage train, and `last` is the epoch's last round.
    """
    key, init, aside = paths.key, paths.out("convert"), paths.scratch / "epoch"
    shutil.rmtree(aside, ignore_errors=True)  # left by a kill
    with writes(aside):
        aside.mkdir()
    model = read_json(init / "hf" / hf.CONFIG)
    trained = TrainedModel(model, params, paths.out("download"), checkpoint=init / "hf")
    model_folder.write(aside, run, trained)
    position = {"step": last.step, "epoch": last.epoch}
    card = UNAUDITED_CARD.format(unaudited=UNAUDITED, key=key, **position)
    write_text(aside / "README.md", card)
    files = {file.name: file for file in sorted(aside.iterdir())}
    for name in run.config.checkpointers:
        checkpoint = destination(name)
        try:
            push(checkpoint, files, run=key, private=True, audited=False, **position)
        except LockstepError as error:
            log.warning(f"train: warning: epoch {last.epoch} is not pushed: {error}")
        else:
            log.info(f"train: {name} has step {last.step}, unaudited")
    shutil.rmtree(aside)
