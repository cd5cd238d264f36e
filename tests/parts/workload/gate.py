"""What `download` reads of arrays and files, for the table of tests/gate."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from parts.workload.tables import DataArrays, DataFiles
from pipeline.runfile.data import Data
from tests.gate.cases import BOMB, DEEP, SPARSE, SURROGATE
from tests.gate.folders import (
    COPIED,
    IN_TREE,
    NAMED,
    NOT_READ,
    PLAIN,
    TENSORS,
    WITHIN,
    FolderRow,
    download,
    tokens,
)


def _arrays(folder: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": np.arange(4)}, folder / name)


def _of_rows(kind: type[Data]) -> Callable[[Path], Data]:
    return lambda folder: kind.model_validate({"path": str(folder), "shuffle": "DontShuffle"})


FOLDERS = [
    FolderRow(
        "`download`, `Arrays`",
        _arrays,
        "a.safetensors",
        download(_of_rows(DataArrays)),
        {**WITHIN, SPARSE: TENSORS, SURROGATE: NAMED, DEEP: NOT_READ, BOMB: TENSORS},
    ),
    FolderRow(
        "`download`, `Files`",
        tokens,
        "a.ds",
        download(_of_rows(DataFiles)),
        {**WITHIN, SPARSE: COPIED, **IN_TREE, BOMB: PLAIN},
    ),
]
