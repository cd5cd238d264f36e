"""Held-out loss: on text that no peer trains on."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pipeline import runfile
from pipeline.optim.optimizer import Tree
from pipeline.programs.loss import measured
from pipeline.programs.placement import DeviceGroup, device_groups
from pipeline.tokens.columns import counted, split
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
    measure: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]],
    rows_NW: np.ndarray,
    size: int,
    columns: tuple[Column, ...] = PLAIN,
) -> float:
    """Return the mean cross-entropy over all rows, nats per predicted token that counts.

    Args:
      measure: Returns each row's cross-entropy, of each of some lots of rows.
      rows_NW: Held-out rows, int32; something counts in each.
      size: Rows measured at once; the last lot is padded, so a single shape is compiled.
      columns: Columns of the rows.
    """
    count = len(rows_NW)
    padded = np.pad(rows_NW, ((0, -count % size), (0, 0)))
    lots = padded.reshape(-1, size, rows_NW.shape[1])
    losses_N = np.concatenate(measure(list(lots)))[:count]
    if "labels" not in columns:  # as many count in each row
        return float(np.mean(losses_N, dtype=np.float64))
    return float(np.average(losses_N, weights=counted(rows_NW, columns).sum(axis=1)))


def on_groups(
    measure: Callable[[Tree, jax.Array], jax.Array], params_on: Mapping[DeviceGroup, Tree]
) -> Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]:
    """Return what measures lots of rows on device groups side by side, for `mean_loss`.

    Args:
      measure: Each row's cross-entropy, `Programs.measure`.
      params_on: A copy of the params on each device group that may help.
    """

    def of(lots: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        turns = zip(lots, cycle(params_on.items()), strict=False)
        return jax.device_get(
            [measure(params, group.put_rows(lot, axis=0)) for lot, (group, params) in turns]
        )

    return of


def exported_loss(
    features: Callable[..., jax.Array],
    head: Callable[[Tree], jax.Array],
    params: Tree,
    data: HeldOutRows,
    peers: runfile.Peers,
) -> float:
    """Return the held-out loss of an exported model, nats per predicted token that counts.

    Args:
      features: As `Exported.features`.
      head: As `Exported.head`.
      params: Its params, in float32.
      data: Held-out rows; at least one.
      peers: `[peers]`: how many rows are measured at once, and on how many devices.
    """
    rows_NW, columns = data

    def measure(params: Tree, rows_BW: jax.Array) -> jax.Array:
        rows = split(rows_BW, columns)
        given = {"positions_BT": rows.position_ids, "sequences_BT": rows.sequence_ids}
        return measured(features(params, rows.inputs, **given), head(params), rows)

    params_on = {group: group.put(params) for group in device_groups(jax.devices(), peers.fsdp)}
    return mean_loss(on_groups(jax.jit(measure), params_on), rows_NW, peers.micro_batch, columns)
