"""`[model.LLM]` checkpoint: what training starts from. Each variant is a class.

A class is named after its enum and Psyche's variant. Fields and rules are Psyche's, those of its
`Model::check` included; strings that Psyche would truncate are refused. Lockstep's own:
`CheckpointInit`, `CheckpointRun` and a manifest's `generation`.
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field, JsonValue

from lockstep.tables.table import NAME_BYTES, U32, Name, Table, text, wrong
from lockstep.tables.variant import Variant, one_of
from pipeline.net.errors import is_path


def _repo_or_folder(value: str) -> str:
    size = len(value.encode())
    if not value:
        raise wrong((), "a non-empty string")
    if size > NAME_BYTES and not is_path(value):
        most = f"at most {NAME_BYTES} bytes, or a folder that begins with / or ./ or ../ or ~"
        raise wrong((), f"{most}; this has {size}")
    return value


class HubRepo(Table):
    """A model on the Hugging Face hub, or a local folder in the same format."""

    repo_id: Annotated[str, AfterValidator(_repo_or_folder)]
    """Name on the hub as owner/name, at most 64 bytes; or a local folder, if it exists and there is
    no revision. A path that begins with / or ./ or ../ or ~ may be longer, and is never looked up
    on the hub."""
    revision: Name | None = None
    """Commit, branch or tag on the hub; by default the main branch."""


# Names in a bucket, and of the files made of it: no name leads out of its folder.
BUCKET = r"[a-z0-9_][a-z0-9._-]*"
_SEGMENT = r"(?!\.{1,2}(?:/|$))[^/\s\x00-\x1f\x7f]+"
PREFIX = rf"{_SEGMENT}(?:/{_SEGMENT})*/?"


def _bucket(value: str) -> str:
    if not re.fullmatch(BUCKET, value):
        raise wrong((), "a bucket name without gs://, of a-z, 0-9, -, _ and . only")
    return value


def _prefix(value: str) -> str:
    if value and not re.fullmatch(PREFIX, value):
        raise wrong((), "names separated by /, without spaces, . and ..")
    return value


class GcsRepo(Table):
    """A model in a bucket of Google Cloud Storage."""

    bucket: Annotated[Name, AfterValidator(_bucket)]
    """Name of the bucket, at most 64 bytes."""
    prefix: Annotated[text(NAME_BYTES, empty=True), AfterValidator(_prefix)] | None = None
    """Folder in the bucket, at most 64 bytes; by default its root."""
    generation: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    """Generation of manifest.json, which lists all other files; by default the newest. Lockstep's
    own key."""


class CheckpointVariant(Variant):
    """Initial weights."""

    where = "model.LLM.checkpoint"


class CheckpointEphemeral(CheckpointVariant):
    """No stored checkpoint."""


class CheckpointDummy(CheckpointVariant):
    """A placeholder with a name, for tests."""

    repo_id: text(NAME_BYTES, empty=True)
    """Any name, at most 64 bytes; may be empty."""
    revision: Name | None = None
    """Any revision, at most 64 bytes."""


class CheckpointHub(CheckpointVariant, HubRepo):
    """A model on the Hugging Face hub, or a local folder in the same format."""


class CheckpointP2P(CheckpointVariant, HubRepo):
    """The params of other peers; before the first round, when no peer has any, those on the hub."""


class CheckpointGcs(CheckpointVariant, GcsRepo):
    """A model in a bucket of Google Cloud Storage."""


class CheckpointP2PGcs(CheckpointVariant, GcsRepo):
    """The params of other peers; before the first round, when no peer has any, a bucket's."""


class CheckpointInit(CheckpointVariant):
    """Freshly initialized weights."""

    config: dict[str, JsonValue]
    """Configuration of the model, with the keys of a Hugging Face config.json."""
    seed: U32
    """Seed of the random initial weights."""


class CheckpointRun(CheckpointVariant):
    """The final state of an earlier run, its optimizer included."""

    newtype = "key"
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    """Key of the earlier run's stage train."""


AnyCheckpoint = one_of(CheckpointVariant)
