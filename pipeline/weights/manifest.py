"""manifest.json in a bucket: which versions of which files make up a checkpoint.

    {"metadata": {"timestamp": ..., "epoch": ..., "step": ..., "run_id": ...},
     "files": [{"filename": ..., "generation": ..., "size_bytes": ...}, ...]}

A generation is one version of an object. The format is Psyche's, whose `files` are only the
weights; `companions`, in the same format, is ours, and Psyche ignores it.
"""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.tables.explain import validate_json
from lockstep.tables.table import AsTuple, Table
from pipeline.weights import hf

NAME = "manifest.json"
Natural = Annotated[int, Field(ge=0)]


class FileVersion(Table):
    """One version of a file."""

    filename: str
    """Name of the file in the manifest's folder."""
    generation: Annotated[int, Field(ge=1)]
    """Version in the bucket."""
    size_bytes: Natural
    """Size in bytes."""


class Metadata(Table, extra="ignore"):
    """The checkpoint, as far as a reader needs to know it."""

    step: Natural
    """Last trained step."""


class Manifest(Table, extra="ignore"):
    """The keys of a manifest that a reader uses; other programs may write more."""

    metadata: Metadata
    """The checkpoint."""
    files: Annotated[tuple[FileVersion, ...], AsTuple, Field(min_length=1)]
    """The weights."""
    companions: Annotated[tuple[FileVersion, ...], AsTuple] | None = None
    """Other files of the model; absent from Psyche's manifests."""


def parse(content: bytes, where: str) -> Manifest:
    """Parse a manifest, which errors call `where`.

    Raises:
      LockstepError: The manifest is invalid, or names a file that cannot be weights in its folder.
    """
    manifest = validate_json(Manifest, content, where)
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


def render(
    step: int, epoch: int, run: str, files: Sequence[FileVersion], companions: Sequence[FileVersion]
) -> str:
    """Return the text of a manifest of weights and their companions; arguments as in `push`."""
    metadata = {
        "client_id": "lockstep",  # required by some of Psyche's releases
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "epoch": epoch,
        "step": step,
        "run_id": run,
    }
    document = {
        "metadata": metadata,
        "files": [file.model_dump() for file in files],
        "companions": [file.model_dump() for file in companions],
    }
    return json.dumps(document, indent=2) + "\n"
