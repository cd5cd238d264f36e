"""What a row of the data knows of its tokens: the inputs, and as Preprocessed data has them more.

A row of L tokens travels from the shards to the programs as one array of C * L int32: its columns,
one after the other. Whoever hands rows on need not know what is in them; `split` says.

Shapes in names: W = C * L, the length of a row.
"""

from typing import Any, NamedTuple

import numpy as np

from pipeline.tokens.shards import PLAIN, Column

UNCOUNTED = -100  # the label of a token that no loss counts

Array = Any  # NumPy's on the host, JAX's in a program: who reads columns there need not load JAX


class Columns(NamedTuple):
    """Rows by column, each [..., L]; None where the data has no such column.

    Attributes:
      inputs: token ids.
      labels: what the token before is to predict; UNCOUNTED where it does not matter.
      position_ids: from 0 and below L.
      sequence_ids: which of the sequences that are packed into the row, from 0; padding has the
        number after the last.
    """

    inputs: Array
    labels: Array | None = None
    position_ids: Array | None = None
    sequence_ids: Array | None = None


def split(rows_W: Array, columns: tuple[Column, ...]) -> Columns:
    """Rows [..., W] by column; of plain data, the rows themselves."""
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
    """Which predictions count in a loss: bool [N, L - 1], of each token but a row's first."""
    inputs_NL, labels_NL, *_ = split(rows_NW, columns)
    if labels_NL is None:
        return np.ones(inputs_NL[:, 1:].shape, bool)
    return labels_NL[:, 1:] != UNCOUNTED
