"""`[model.LLM]` checkpoint: what training starts from. Each variant is a class.

A class is named after its enum and Psyche's variant. Fields and rules are Psyche's, those of its
`Model::check` included; strings that Psyche would truncate are refused. Lockstep's own:
`CheckpointInit`, `CheckpointRun` and a manifest's `generation`.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from pipeline.runfile.serde_enum import Variant, one_of
from pipeline.runfile.table import NAME_BYTES, U32, Name, Table, text, wrong


def _repo_or_folder(value: str) -> str:
    size, is_path = len(value.encode()), value.startswith(("/", "./", "../"))
    if not value:
        raise wrong((), "a string that is not empty")
    if size > NAME_BYTES and not is_path:
        most = f"at most {NAME_BYTES} bytes, or a folder that begins with / or ./ or ../"
        raise wrong((), f"{most}, and this has {size}")
    return value


class HubRepo(Table):
    """A model on the Hugging Face hub, or a folder of that form."""

    repo_id: Annotated[str, AfterValidator(_repo_or_folder)]
    """owner/name on the hub, at most 64 bytes; or a folder, when it exists and no revision is
    given (of any length when it begins with / or ./ or ../)."""
    revision: Name | None = None
    """The commit, branch or tag on the hub."""


# Names in a bucket, and of the files made of it: no name leads out of its folder.
BUCKET = r"[a-z0-9_][a-z0-9._-]*"
_SEGMENT = r"(?!\.{1,2}(?:/|$))[^/\s\x00-\x1f\x7f]+"
PREFIX = rf"{_SEGMENT}(?:/{_SEGMENT})*/?"


def _bucket(value: str) -> str:
    if not re.fullmatch(BUCKET, value):
        raise wrong((), "a bucket's name: a-z, 0-9, - _ and . alone, and not gs://")
    return value


def _prefix(value: str) -> str:
    if value and not re.fullmatch(PREFIX, value):
        raise wrong((), "names with / between them, without spaces, . and ..")
    return value


class GcsRepo(Table):
    """A model in a bucket of Google Cloud Storage."""

    bucket: Annotated[Name, AfterValidator(_bucket)]
    """The bucket, at most 64 bytes."""
    prefix: Annotated[text(NAME_BYTES, empty=True), AfterValidator(_prefix)] | None = None
    """The folder in the bucket."""
    generation: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    """Generation of its manifest.json, which names all other files; absent is the newest.
    Lockstep's own key."""


class CheckpointVariant(Variant):
    """What training starts from."""

    where = "model.LLM.checkpoint"


class CheckpointEphemeral(CheckpointVariant):
    """Nothing that is stored."""


class CheckpointDummy(CheckpointVariant):
    """Nothing, under a name; for tests."""

    repo_id: text(NAME_BYTES, empty=True)
    """Any name, or none."""
    revision: Name | None = None
    """Any revision."""


class CheckpointHub(CheckpointVariant, HubRepo):
    """A model on the Hugging Face hub, or a folder of that form."""


class CheckpointP2P(CheckpointVariant, HubRepo):
    """The params that other peers have; the config from the hub."""


class CheckpointGcs(CheckpointVariant, GcsRepo):
    """A model in a bucket of Google Cloud Storage."""


class CheckpointP2PGcs(CheckpointVariant, GcsRepo):
    """The params that other peers have; the config from a bucket."""


class CheckpointInit(CheckpointVariant):
    """Fresh weights."""

    config: dict[str, JsonValue]
    """The model, with the keys of a Hugging Face config.json."""
    seed: U32
    """Seed of the random initial weights."""


class CheckpointRun(CheckpointVariant):
    """The final state of an earlier run, its optimizer included."""

    newtype = "key"
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    """The earlier run's key."""


AnyCheckpoint = one_of(CheckpointVariant)
