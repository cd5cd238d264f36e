"""Some rows of a run's data, by their index, in a file for others.

    indices    int64 [N], ascending
    rows       int32 [N, W]: the columns of a row, one after the other

A bundle and a publication hold the sequences that replayed peers were assigned; the reader has no
other data of the run.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from lockstep.errors import LockstepError
from lockstep.programs.columns import UNCOUNTED, Column, Columns
from lockstep.swarm.peers import Rows
from lockstep.transcript.entry import Entry
from lockstep.transcript.trees import load_arrays, save_tree
from pipeline import runfile


class GivenRows:
    """Rows by their ascending indices; stands in for `tokens.Sequences`. `name` is the file's."""

    def __init__(self, name: str, indices_N: np.ndarray, rows_NW: np.ndarray):
        self.name, self.indices_N, self.rows_NW = name, indices_N, rows_NW

    def take(self, indices_N: np.ndarray) -> np.ndarray:
        """Return the file's rows at these indices."""
        rows_N = np.searchsorted(self.indices_N, indices_N)
        if not np.array_equal(self.indices_N.take(rows_N, mode="clip"), indices_N):
            text = f"lacks some of the sequences {indices_N[0]} to {indices_N[-1]}"
            raise LockstepError(f"{self.name}: {text}, expected all that were assigned")
        return self.rows_NW[rows_N]


def joined(several: Sequence[GivenRows]) -> GivenRows:
    """Return the rows of several files as one."""
    name = ", ".join(one.name for one in several)
    indices_N, rows_N = np.unique(
        np.concatenate([one.indices_N for one in several]), return_index=True
    )
    merged = GivenRows(name, indices_N, np.concatenate([one.rows_NW for one in several])[rows_N])
    for one in several:
        if not np.array_equal(merged.take(one.indices_N), one.rows_NW):
            raise LockstepError(
                f"{one.name}: a sequence differs between the files {name}, expected the same in all"
            )
    return merged


def assigned(entries: Iterable[Entry], peers: Sequence[int]) -> np.ndarray:
    """Return the indices of all sequences that the peers' messages in these rounds are made of."""
    spans = [
        entry.round.assignment[peer]
        for entry in entries
        for peer in peers
        if peer in entry.evidence.messages
    ]
    return np.concatenate([np.empty(0, np.int64), *(np.arange(a, b + 1) for a, b in spans)])


def write(path: Path, data: Rows, indices: np.ndarray) -> None:
    """Write the rows of some data at these indices to a file, each once."""
    indices_N = np.unique(indices)
    save_tree(path, {"indices": indices_N, "rows": np.ascontiguousarray(data.take(indices_N))})


def read(
    path: Path, columns: tuple[Column, ...], run: runfile.Run, vocab_size: int | None
) -> GivenRows:
    """Read what a stranger may have written, with token ids below `vocab_size`.

    With None, rows are not tokens, and may hold any numbers.
    """
    arrays, length = load_arrays(path), run.llm.max_seq_len
    width = length * len(columns)
    indices_N, rows_NW = (arrays.get(name, np.zeros(0)) for name in ("indices", "rows"))
    if (
        arrays.keys() != {"indices", "rows"}
        or (indices_N.dtype, indices_N.shape) != (np.int64, (indices_N.size,))
        or (rows_NW.dtype, rows_NW.shape) != (np.int32, (indices_N.size, width))
        or not indices_N.size
        or (np.diff(indices_N) <= 0).any()
    ):
        raise LockstepError(
            f"{path}: expected ascending indices, and for each a row of {width} numbers"
        )
    if vocab_size is None:
        return GivenRows(path.name, indices_N, rows_NW)
    # bounds of each number; there are at most as many packed sequences as tokens, and padding
    limits = Columns(vocab_size, vocab_size, length, length + 1)._asdict()
    for name, ids_NL in zip(columns, np.split(rows_NW, width // length, 1), strict=True):
        ids = ids_NL[ids_NL != UNCOUNTED] if name == "labels" else ids_NL
        if ids.size and not 0 <= ids.min() <= ids.max() < limits[name]:
            raise LockstepError(f"{path}: expected {name} from 0 and below {limits[name]}")
    return GivenRows(path.name, indices_N, rows_NW)
