"""A place for each data location of a workload, for tests that hold of all locations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.pipeline.sources.places import LENGTH, SEEDED, Place


@contextmanager
def _arrays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    numbers = np.arange(50 * (LENGTH - 1)).reshape(50, LENGTH - 1)
    arrays = {"x": numbers.astype(np.float32), "y": np.arange(50, dtype=np.uint8)}
    save_file(arrays, folder / "a.safetensors")
    how = {"held_out_percent": 20.0, "shuffle": SEEDED}
    yield Place({"Arrays": {"path": str(folder / "a.safetensors"), **how}}, listed=False)


@contextmanager
def _files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for number in range(40):
        (folder / f"{number}.jpg").write_bytes(bytes([number]) * number)
    how = {"held_out_percent": 20.0, "shuffle": SEEDED}
    yield Place({"Files": {"path": str(folder), **how}}, listed=False, sure=False)


PLACES = {"arrays": _arrays, "files": _files}
