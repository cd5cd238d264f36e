"""Held-out loss, and the numbers that follow from it: on text that no peer trains on.

Shapes in names: N sequences of T tokens, W their width in a row, V vocabulary, P predictions.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from pipeline import runfile
from pipeline.optim.optimizer import Tree
from pipeline.programs.loss import measured
from pipeline.programs.placement import DeviceGroup, device_groups
from pipeline.tokens.columns import counted, split
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import PLAIN, Column, read_shards

NUMBERS = ("held_out_loss", "perplexity", "bits_per_byte", "sequences", "tokens", "bytes")
UNKNOWN = -1  # bytes of a token that is not in the tokenizer


class HeldOutRows(NamedTuple):
    """Held-out rows: int32 [N, W], with N = 0 where nothing is held out; and their columns."""

    rows_NW: np.ndarray
    columns: tuple[Column, ...]


def read(run: runfile.Run, shards: Path) -> HeldOutRows:
    """Read the first `[held_out] sequences` held-out rows, and keep those where anything counts.

    Of rows that are not tokens, each counts.
    """
    listed = read_shards(shards)
    length, network = run.llm.max_seq_len, run.runtime
    sequences = Sequences(shards, listed, "held_out", length, network)
    rows_NW = sequences.take(np.arange(min(len(sequences), run.held_out.sequences)))
    if listed.rows is not None:
        return HeldOutRows(rows_NW, listed.columns)
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

    `measure` is `Programs.measure`; each device group that may help has a copy of the params.
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

    `features` and `head` are those of `Exported`, and params float32; there is a row at least.
    `[peers]` says how many rows are measured at once, and on how many devices.
    """
    rows_NW, columns = data

    def measure(params: Tree, rows_BW: jax.Array) -> jax.Array:
        rows = split(rows_BW, columns)
        given = {"positions_BT": rows.position_ids, "sequences_BT": rows.sequence_ids}
        return measured(features(params, rows.inputs, **given), head(params), rows)

    params_on = {group: group.put(params) for group in device_groups(jax.devices(), peers.fsdp)}
    return mean_loss(on_groups(jax.jit(measure), params_on), rows_NW, peers.micro_batch, columns)


def numbers(
    loss: float, data: HeldOutRows, tokenizer: Tokenizer | None, notes: list[str]
) -> dict[str, float | int | None]:
    """Return the numbers of metrics/evaluate.json that a held-out loss gives.

    The loss is in nats per predicted token that counts; `tokens` and `bytes` of the rows are those
    that are predicted. `notes` gains the reason if bits per byte are unknown.
    """
    rows_NW, columns = data
    rows = split(rows_NW, columns)
    labels_NT = rows.inputs if rows.labels is None else rows.labels
    labels_P = labels_NT[:, 1:][counted(rows_NW, columns)]
    size = bytes_of(labels_P, tokenizer, notes)
    return {
        "held_out_loss": loss,
        "perplexity": float(np.exp(loss)),
        "bits_per_byte": loss * labels_P.size / math.log(2) / size if size else None,
        "sequences": len(rows_NW),
        "tokens": labels_P.size,
        "bytes": size,
    }


def bytes_of(tokens_P: np.ndarray, tokenizer: Tokenizer | None, notes: list[str]) -> int | None:
    """Return the bytes of text that these tokens stand for, or None if that is unknown.

    In a byte-level vocabulary (GPT-2's, Llama 3's, Qwen's) a token is spelled with one character
    for each of its bytes. A special token, such as the end of a document, has no bytes of text, but
    its bits count in bits per byte. `notes` gains the reason if the bytes are unknown.
    """
    if tokenizer is None:
        notes.append("there is no tokenizer.json, so bits per byte are unknown")
        return None
    if "ByteLevel" not in _decoders(tokenizer):
        notes.append("the tokenizer is not byte-level, so bits per byte are unknown")
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    bytes_V = np.full(tokens_P.max() + 1, UNKNOWN)  # a tokenizer may have any larger id
    for token, index in vocabulary.items():
        if index < len(bytes_V):
            bytes_V[index] = len(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        if index < len(bytes_V):
            bytes_V[index] = 0 if added.special else len(added.content.encode())
    found_P = bytes_V[tokens_P]
    if (found_P == UNKNOWN).any():
        notes.append(
            f"token {tokens_P[found_P == UNKNOWN][0]} of the held-out split is not in the "
            "tokenizer, so bits per byte are unknown"
        )
        return None
    return int(found_P.sum())


def _decoders(tokenizer: Tokenizer) -> list[str]:
    """The kinds of the tokenizer's decoders, in order."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    chain = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in chain]
