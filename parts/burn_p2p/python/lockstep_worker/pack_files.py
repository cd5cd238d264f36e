"""burn_p2p's parameter packs as files, for a worker and its host: a folder with two of them.

    manifest.json    format, hashes of layout and schema, how many values there are
    values.f32le     the values of all tensors, float32 in little-endian order

Ours has the hash of the values too, which older readers ignore. NumPy alone is imported.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

FORMAT = "burn-p2p-python-flattened-parameter-pack-v1"
MANIFEST, VALUES = "manifest.json", "values.f32le"
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
CHUNK = 1 << 20  # bytes that are read at once


def write(folder: Path, pieces: Iterable[np.ndarray], facts: dict) -> None:
    """Write a pack: values, piece by piece, and a manifest with these facts beside what is known.

    `facts` has `model_schema_hash` and `layout_hash`.
    """
    sha256, count = hashlib.sha256(), 0
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / VALUES).open("wb") as file, ThreadPoolExecutor(1) as executor:
        for piece in pieces:
            values = np.ascontiguousarray(piece, "<f4").reshape(-1)
            executor.submit(sha256.update, values)  # takes longer than the file
            file.write(values)
            count += values.size
    manifest = {"format": FORMAT, **facts, "parameter_count": count, "values_f32_le": VALUES}
    manifest["values_sha256"] = sha256.hexdigest()
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def read(folder: Path, layout_hash: str, schema: str | None, count: int) -> np.ndarray:
    """Return the values of a pack that a stranger may have written: float32 [count].

    Raises:
        ValueError: it is no pack, of another layout, schema (None for any) or count, or its values
            are not those that it was written with.
    """
    path = folder / MANIFEST
    manifest = json.loads(path.read_text(encoding="utf-8"))
    expected = {"format": FORMAT, "layout_hash": layout_hash, "parameter_count": count}
    expected |= {} if schema is None else {"model_schema_hash": schema}
    for name, value in expected.items():
        actual = manifest.get(name) if isinstance(manifest, dict) else None
        if type(actual) is not type(value) or actual != value:
            raise ValueError(f"{path}: {name} is {str(actual)[:300]!r}, expected {value!r}")
    name = manifest.get("values_f32_le")
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise ValueError(f"{path}: values_f32_le is {str(name)[:100]!r}, expected a file's name")
    if (size := (folder / name).stat().st_size) != 4 * count:
        raise ValueError(f"{folder / name}: {size} bytes, expected {4 * count} of {count} values")
    values, actual = _read_hashed(folder / name, count)
    if (due := manifest.get("values_sha256", actual)) != actual:
        raise ValueError(f"{folder / name}: sha256 {actual}, expected {str(due)[:64]} as in {path}")
    return values


def _read_hashed(path: Path, count: int) -> tuple[np.ndarray, str]:
    """Return the values in a pack's file, and their SHA-256, computed while they are read."""
    values, sha256 = np.empty(count, "<f4"), hashlib.sha256()
    data = values.view(np.uint8)
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as executor:
        for start in range(0, len(data), CHUNK):
            piece = data[start : start + CHUNK]
            if file.readinto(piece) != len(piece):
                raise ValueError(f"{path}: shorter than it was a moment ago")
            executor.submit(sha256.update, piece)
    return values, sha256.hexdigest()
