"""Files beside the weights, such as a tokenizer: which of them are proven."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, brief
from lockstep.files import read_json
from parts.publication.checks.claims import PublicClaim
from parts.publication.layout import Publication
from pipeline import runfile
from pipeline.weights import generation_config, model_folder


def claims(
    folder: Path, publication: Publication, run: runfile.Run, model: dict[str, Any]
) -> list[PublicClaim]:
    """Return what is known of each file beside the weights.

    generation_config.json of a run that began with fresh weights follows from the tokenizer and the
    model. A tokenizer was trained on, or came with, data that only the author has.

    Raises:
      LockstepError: That file is another.
    """
    named = publication.companions
    found: list[PublicClaim] = []
    fresh = isinstance(run.llm.checkpoint, runfile.CheckpointInit)
    if generation_config.NAME in named and fresh:
        _check_generation(folder, run, model, named)
        named = [name for name in named if name != generation_config.NAME]
        text = f"{generation_config.NAME} made again"
        found.append(PublicClaim(generation_config.NAME, "proven", text))
    return found + [PublicClaim(name, "stated", name) for name in named]


def _check_generation(
    folder: Path, run: runfile.Run, model: dict[str, Any], named: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as name:  # a checkpoint without settings of its own
        for file in named:
            if file != generation_config.NAME:
                shutil.copyfile(folder / file, Path(name) / file)
        whole = model_folder.with_context(model, run.llm.max_seq_len)
        due = generation_config.make(Path(name) / "none", whole, Path(name))
    said = read_json(folder / generation_config.NAME)
    if said != due:
        raise LockstepError(
            f"{generation_config.NAME}: {brief(str(said))}, expected {brief(str(due))} as stage "
            "export makes it"
        )
