"""manifest.json in a bucket: which versions of which files make a checkpoint.

    {"metadata": {"timestamp": ..., "epoch": ..., "step": ..., "run_id": ...},
     "files": [{"filename": ..., "generation": ..., "size_bytes": ...}, ...]}

A generation is one version of an object. The form is Psyche's, whose `files` are the weights alone;
`companions`, of the same form, is ours, and Psyche does not look at it.
"""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field

from pipeline.errors import LockstepError
from pipeline.runfile.explain import validate
from pipeline.runfile.table import AsTuple, Table
from pipeline.weights import hf

NAME = "manifest.json"
Count = Annotated[int, Field(ge=0)]


class Entry(Table):
    """One version of a file."""

    filename: str
    """Its name in the manifest's folder."""
    generation: Annotated[int, Field(ge=1)]
    """Its version in the bucket."""
    size_bytes: Count
    """Its size."""


class Metadata(Table, extra="ignore"):
    """Which checkpoint it is, as far as a reader needs it."""

    step: Count
    """The last step that was trained."""


class Manifest(Table, extra="ignore"):
    """What a reader takes from a manifest; keys beside these are other programs'."""

    metadata: Metadata
    """Which checkpoint it is."""
    files: Annotated[tuple[Entry, ...], AsTuple, Field(min_length=1)]
    """The weights."""
    companions: Annotated[tuple[Entry, ...], AsTuple] | None = None
    """What stands beside the weights; absent from Psyche's manifests."""


def parse(content: bytes, where: str) -> Manifest:
    """Reads a manifest.

    Args:
      content: its bytes.
      where: what errors call it.

    Raises:
      LockstepError: it is none, or names a file that cannot be a model's weights in that folder.
    """
    try:
        document = json.loads(content)
    except ValueError as error:
        raise LockstepError(f"{where}: expected JSON: {error}") from error
    manifest = validate(Manifest, document, where)
    names = [entry.filename for entry in manifest.files]
    for number, name in enumerate(names):
        if not re.fullmatch(hf.SHARD, name):
            raise LockstepError(
                f"{where}: files[{number}].filename is {name!r}, expected a safetensors file in "
                "the same folder"
            )
        if names.count(name) > 1 or (name == hf.WEIGHTS and len(names) > 1):
            raise LockstepError(
                f"{where}: files[{number}].filename is {name!r}, expected {hf.WEIGHTS} alone, or "
                "each of several shards once"
            )
    return manifest


def render(step: int, epoch: int, run: str, files: Sequence[Entry], beside: Sequence[Entry]) -> str:
    """A manifest's text.

    Args:
      step: the last that was trained.
      epoch: its epoch.
      run: the run's name.
      files: the weights.
      beside: what stands beside them.
    """
    metadata = {
        "client_id": "lockstep",  # which some of Psyche's releases ask for
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "epoch": epoch,
        "step": step,
        "run_id": run,
    }
    document = {
        "metadata": metadata,
        "files": [entry.model_dump() for entry in files],
        "companions": [entry.model_dump() for entry in beside],
    }
    return json.dumps(document, indent=2) + "\n"
