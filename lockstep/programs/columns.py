"""Columns of a data row: token ids, and for Preprocessed data labels, positions and sequence ids.

A row of L tokens travels from the shards to the programs as one array of C * L int32: its columns,
one after the other. Code that passes rows on need not know the columns; `split` separates them.

Shapes in names: W = C * L, the length of a row.
"""

from typing import Any, Literal, NamedTuple

import numpy as np

Column = Literal["inputs", "labels", "position_ids", "sequence_ids"]
PLAIN: tuple[Column, ...] = ("inputs",)
UNCOUNTED = -100  # the label of a token that no loss counts

Array = Any  # NumPy's on the host, JAX's in a program; the host need not load JAX


class Columns(NamedTuple):
    """Rows by column, each [..., L]; None where the data has no such column.

    Attributes:
      inputs: token ids.
      labels: the token to predict at the position before; UNCOUNTED where no loss counts it.
      position_ids: positions from 0 to L - 1.
      sequence_ids: number of the packed sequence in its row, from 0; padding has the number after
        the last.
    """

    inputs: Array
    labels: Array | None = None
    position_ids: Array | None = None
    sequence_ids: Array | None = None


def split(rows_W: Array, columns: tuple[Column, ...]) -> Columns:
    """Split data rows [..., W] into columns; plain rows are their own inputs."""
    if columns == PLAIN:
        return Columns(rows_W)
    length = rows_W.shape[-1] // len(columns)
    return Columns(
        **{
            column: rows_W[..., number * length : (number + 1) * length]
            for number, column in enumerate(columns)
        }
    )


def counted(rows_NW: np.ndarray, columns: tuple[Column, ...]) -> np.ndarray:
    """Return which predictions of columns a loss counts: bool [N, L - 1], without a row's first."""
    inputs_NL, labels_NL, *_ = split(rows_NW, columns)
    if labels_NL is None:
        return np.ones(inputs_NL[:, 1:].shape, bool)
    return labels_NL[:, 1:] != UNCOUNTED
