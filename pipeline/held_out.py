"""Loss on text that no peer trains on."""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import numpy as np

from pipeline import config, tokens
from pipeline.optim.optimizer import Tree
from pipeline.placement import Place


def read(run: config.Run, shards: Path) -> np.ndarray:
    """The held-out sequences that are measured: int32 [N, T]; N is 0 where there are none.

    Args:
      run: the whole run; at most its `[held_out] sequences` are read.
      shards: what stage download left.
    """
    sequences = tokens.open_shards(shards, "held_out", run.llm.max_seq_len)
    return sequences.take(np.arange(min(len(sequences), run.held_out.sequences)))


def mean_loss(
    measure: Callable[[Tree, jax.Array], jax.Array],
    params_at: Mapping[Place, Tree],
    tokens_NT: np.ndarray,
    size: int,
) -> float:
    """Mean cross-entropy in nats per predicted token, over all sequences.

    Args:
      measure: each sequence's cross-entropy, `Programs.measure`.
      params_at: the params in each place that may help.
      tokens_NT: int32 held-out sequences.
      size: sequences measured at once; the last lot is padded, so that one shape is compiled.
    """
    places = list(params_at)
    count = len(tokens_NT)
    padded = np.pad(tokens_NT, ((0, -count % size), (0, 0)))
    lots = padded.reshape(-1, size, tokens_NT.shape[1])
    losses = [
        measure(params_at[place], place.put_sequences(lot))
        for lot, place in zip(lots, places * len(lots), strict=False)
    ]
    return float(np.mean(np.concatenate(jax.device_get(losses))[:count], dtype=np.float64))
