"""Held-out loss: on text that no peer trains on."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pipeline import runfile
from pipeline.optim.optimizer import Tree
from pipeline.programs.placement import DeviceGroup
from pipeline.tokens.columns import counted
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import PLAIN, Column, read_shards


class HeldOutRows(NamedTuple):
    """Held-out rows: int32 [N, W], with N = 0 where nothing is held out; and their columns."""

    rows_NW: np.ndarray
    columns: tuple[Column, ...]


def read(run: runfile.Run, shards: Path) -> HeldOutRows:
    """Read the first `[held_out] sequences` held-out rows, and keep those where anything counts."""
    listed = read_shards(shards)
    length, network = run.llm.max_seq_len, run.runtime
    sequences = Sequences(shards, listed, "held_out", length, network)
    rows_NW = sequences.take(np.arange(min(len(sequences), run.held_out.sequences)))
    return HeldOutRows(rows_NW[counted(rows_NW, listed.columns).any(axis=1)], listed.columns)


def mean_loss(
    measure: Callable[[Tree, jax.Array], jax.Array],
    params_on: Mapping[DeviceGroup, Tree],
    rows_NW: np.ndarray,
    size: int,
    columns: tuple[Column, ...] = PLAIN,
) -> float:
    """Return the mean cross-entropy over all rows, nats per predicted token that counts.

    Args:
      measure: Each row's cross-entropy, `Programs.measure`.
      params_on: A copy of the params on each device group that may help.
      rows_NW: Held-out rows, int32; something counts in each.
      size: Rows measured at once; the last lot is padded, so a single shape is compiled.
      columns: Columns of the rows.
    """
    groups = list(params_on)
    count = len(rows_NW)
    padded = np.pad(rows_NW, ((0, -count % size), (0, 0)))
    lots = padded.reshape(-1, size, rows_NW.shape[1])
    losses = [
        measure(params_on[group], group.put_rows(lot, axis=0))
        for lot, group in zip(lots, groups * len(lots), strict=False)
    ]
    losses_N = np.concatenate(jax.device_get(losses))[:count]
    if "labels" not in columns:  # as many count in each row
        return float(np.mean(losses_N, dtype=np.float64))
    return float(np.average(losses_N, weights=counted(rows_NW, columns).sum(axis=1)))
