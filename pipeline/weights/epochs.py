"""The params that end an epoch, pushed while training goes on: nobody has audited them yet."""

import logging
import shutil
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_text, writes
from lockstep.optim.optimizer import Tree
from lockstep.protocol.round import Round
from pipeline import runfile
from pipeline.runfile.psyche import destination
from pipeline.weights import hf, model_folder, upload

log = logging.getLogger(__name__)

CARD = """\
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
    run: runfile.Run, key: str, params: Tree, last: Round, *, init: Path, shards: Path, aside: Path
) -> None:
    """Push the params to where `[config] checkpointers` say; what goes wrong is a warning.

    `key` is that of the run's stage train, and `last` the epoch's last round. `init` and `shards`
    are what the stages convert and download left; `aside`, where the files are written, is removed.
    """
    shutil.rmtree(aside, ignore_errors=True)  # left by a kill
    with writes(aside):
        aside.mkdir()
    model_folder.write(
        aside,
        read_json(init / "hf" / hf.CONFIG),
        run.llm.max_seq_len,
        params,
        run.export.dtype,
        tokenizer=shards / "tokenizer",
        checkpoint=init / "hf",
    )
    about = {"step": last.step, "epoch": last.epoch}
    card = CARD.format(unaudited=upload.UNAUDITED, key=key, **about)
    write_text(aside / "README.md", card)
    files = {file.name: file for file in sorted(aside.iterdir())}
    for name in run.config.checkpointers:
        checkpoint = destination(name)
        try:
            upload.push(checkpoint, files, run=key, private=True, audited=False, **about)
        except LockstepError as error:
            log.warning(f"train: warning: epoch {last.epoch} is not pushed: {error}")
        else:
            log.info(f"train: {name} has step {last.step}, unaudited")
    shutil.rmtree(aside)
