"""Loss on text that no peer trains on."""

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


class HeldOut(NamedTuple):
    """What is measured: int32 rows_NW, N of them 0 where there are none, and their columns."""

    rows_NW: np.ndarray
    columns: tuple[Column, ...]


def read(run: runfile.Run, shards: Path) -> HeldOut:
    """The held-out rows that are measured: those of which anything counts.

    Args:
      run: the whole run; at most its `[held_out] sequences` are read.
      shards: what stage download left.
    """
    listed = read_shards(shards)
    length, network = run.llm.max_seq_len, run.runtime.network
    sequences = Sequences(shards, listed, "held_out", length, network)
    rows_NW = sequences.take(np.arange(min(len(sequences), run.held_out.sequences)))
    return HeldOut(rows_NW[counted(rows_NW, listed.columns).any(axis=1)], listed.columns)


def mean_loss(
    measure: Callable[[Tree, jax.Array], jax.Array],
    params_on: Mapping[DeviceGroup, Tree],
    rows_NW: np.ndarray,
    size: int,
    columns: tuple[Column, ...] = PLAIN,
) -> float:
    """Mean cross-entropy in nats per predicted token that counts, over all rows.

    Args:
      measure: each row's cross-entropy, `Programs.measure`.
      params_on: a copy of the params on each device group that may help.
      rows_NW: int32 held-out rows; something counts of each.
      size: rows measured at once; the last lot is padded, so that one shape is compiled.
      columns: of the rows.
    """
    groups = list(params_on)
    count = len(rows_NW)
    padded = np.pad(rows_NW, ((0, -count % size), (0, 0)))
    lots = padded.reshape(-1, size, rows_NW.shape[1])
    losses = [
        measure(params_on[group], group.put_sequences(lot))
        for lot, group in zip(lots, groups * len(lots), strict=False)
    ]
    losses_N = np.concatenate(jax.device_get(losses))[:count]
    if "labels" not in columns:  # each row has as many
        return float(np.mean(losses_N, dtype=np.float64))
    return float(np.average(losses_N, weights=counted(rows_NW, columns).sum(axis=1)))
