"""burn_p2p's parameter packs, to and from inner loops: values and a manifest.

    manifest.json    format, hashes of layout and schema, how many values there are
    values.f32le     the values of all tensors, float32 in little-endian order

Ours has the hash of the values too, which older readers ignore.
"""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_json
from lockstep.tables.explain import validate
from lockstep.tables.table import Table
from pipeline.stage.given_files import check_file

FORMAT = "burn-p2p-python-flattened-parameter-pack-v1"
MANIFEST, VALUES = "manifest.json", "values.f32le"
HashText = Annotated[str, Field(max_length=300)]


class PackManifest(Table, extra="ignore"):
    """manifest.json; its other keys are for people."""

    format: Literal["burn-p2p-python-flattened-parameter-pack-v1"]
    model_schema_hash: HashText
    """Hash of the model's schema, as the host has told."""
    layout_hash: HashText
    """Hash of the tensors' names, shapes and dtypes."""
    parameter_count: Annotated[int, Field(ge=0)]
    values_f32_le: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}$")]
    """Name of the file of values."""
    values_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Hash of that file."""


def write_pack(folder: Path, values: np.ndarray, *, layout_hash: str, schema_hash: str) -> None:
    """Write values, float32 [parameters], as a pack."""
    folder.mkdir(parents=True)
    values = np.ascontiguousarray(values, "<f4")
    values.tofile(folder / VALUES)
    manifest = PackManifest(
        format=FORMAT,
        model_schema_hash=schema_hash,
        layout_hash=layout_hash,
        parameter_count=values.size,
        values_f32_le=VALUES,
        values_sha256=hashlib.sha256(values).hexdigest(),
    )
    write_json(folder / MANIFEST, manifest.model_dump())


def read_pack(folder: Path, *, count: int, layout_hash: str, schema_hash: str) -> np.ndarray:
    """Return the values of a pack that a stranger may have written: float32 [count].

    Raises:
      LockstepError: It is no pack, of another model or layout, or its values are damaged, or no
        finite numbers.
    """
    path = folder / MANIFEST
    check_file(path, folder)
    manifest = validate(PackManifest, read_json(path), str(path))
    for name, expected in {
        "parameter_count": count,
        "layout_hash": layout_hash,
        "model_schema_hash": schema_hash,
    }.items():
        if (found := getattr(manifest, name)) != expected:
            raise LockstepError(f"{path}: {name} is {found!r}, expected {expected!r}")
    file = folder / manifest.values_f32_le
    check_file(file, folder)
    if (size := os.stat(file).st_size) != 4 * count:
        raise LockstepError(f"{file}: {size} bytes, expected {4 * count} of {count} values")
    values = np.fromfile(file, "<f4")
    if manifest.values_sha256 is not None:
        found = hashlib.sha256(values).hexdigest()
        if found != manifest.values_sha256:
            raise LockstepError(
                f"{file}: sha256 {found[:12]}, expected {manifest.values_sha256[:12]} as in {path}"
            )
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise LockstepError(f"{file}: value {bad} is {values[bad]}, expected finite numbers")
    return values
