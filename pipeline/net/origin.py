"""What a server says of a file: which version of it is where, its checksum, and valid JSON of that.

A checksum is `sha256:`, `git-sha1:`, `md5:` or `crc32c:` and hexadecimal.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from .errors import NetError, brief

READ_BYTES = 2**20
SIZES = {"md5": 16, "crc32c": 4}  # bytes of those of Google's storage, the surest first
VERSIONED = ("gs", "hf")  # schemes whose addresses name the version of a file
Checksum = Annotated[str, Field(pattern=r"^(sha256|git-sha1|md5|crc32c):[0-9a-f]+$")]
AnyRecord = TypeVar("AnyRecord", bound=BaseModel)


class Origin(BaseModel, strict=True, frozen=True, extra="forbid"):
    """The origin of a file: one version of it, and where its bytes come from."""

    url: str  #: Address; a path is a file of this machine.
    size: Annotated[int, Field(ge=0)]  #: Length in bytes.
    #: The server's name of this version: an ETag, a generation; of a file of this machine, the
    #: time of its last change in nanoseconds; None without one.
    tag: str | None = None
    checksum: Checksum | None = None  #: The server's checksum of its bytes.

    @property
    def is_local(self) -> bool:
        """Whether the origin is a file of this machine, which is read in place."""
        return "://" not in self.url

    @property
    def is_addressed(self) -> bool:
        """Whether the origin's address names the version, so that no answer is of another."""
        return self.url.partition("://")[0] in VERSIONED


def hasher(kind: str, size: int) -> Any:
    """Return a new hash object of an origin's checksum, with `update` and `digest`.

    `size` is that of the whole file in bytes, with which git's hash begins.
    """
    match kind:
        case "git-sha1":
            return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        case "crc32c":
            import google_crc32c

            return google_crc32c.Checksum()
        case _:
            return hashlib.new(kind, usedforsecurity=False)


def hash_file(path: Path, kind: str = "sha256", size: int | None = None) -> str:
    """Return the hash of an origin's file, or of its first `size` bytes, in hexadecimal."""
    left = path.stat().st_size if size is None else size
    digest = hasher(kind, left)
    with open(path, "rb") as file:
        while left and (piece := file.read(min(READ_BYTES, left))):
            digest.update(piece)
            left -= len(piece)
    if left:
        raise NetError(f"{path}: cut short, expected {size} bytes")
    return digest.digest().hex()


# ---- JSON that servers send ----


def parse(text: str | bytes, name: str) -> Any:
    """Return the value of a server's JSON text in which no key stands twice in a table."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise NetError(f"{name}: expected JSON: {error}") from None


def validate(model: type[AnyRecord], document: Any, name: str) -> AnyRecord:
    """Return a server's JSON value as a model, whose first fault the error names."""
    try:
        return model.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        key = "".join(parts).removeprefix(".") or "it"
        value = brief(json.dumps(first["input"]))
        raise NetError(f"{name}: {key} is {value}, expected {brief(first['msg'], 200)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice in a table: readers differ in which of the two they take."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key stands twice in a table")
    return table
