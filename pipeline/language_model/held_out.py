"""Held-out loss, and the numbers that follow from it: on text that no peer trains on.

A split is measured on some of its rows, which are spread over all of it: neighbours are often of
one document, and so the first rows of a file say little of the rest.

Shapes in names: N sequences of T tokens, W their width in a row, V vocabulary, P predictions.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.columns import Column, counted, split
from lockstep.programs.loss import measured
from lockstep.programs.permutation import permute
from lockstep.programs.placement import device_groups, on_groups
from pipeline import runfile
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards
from pipeline.weights.exported import Exported

NUMBERS = (
    "held_out_loss",
    "held_out_stderr",
    "perplexity",
    "bits_per_byte",
    "sequences",
    "split_sequences",
    "tokens",
    "bytes",
)
UNKNOWN_TOKEN = -1  # bytes of a token that is not in the tokenizer


class HeldOutRows(NamedTuple):
    """Held-out rows, N = 0 where nothing is held out."""

    rows_NW: np.ndarray  # int32
    columns: tuple[Column, ...]
    indices_N: np.ndarray  # int64, ascending: where they stand in the split, or half
    split_size: int  # rows of the whole split, or half


class MeanLoss(NamedTuple):
    """A mean of held-out rows' losses, in nats per predicted token that counts.

    Its standard error is that of stretches of the split or of documents, whose rows are alike, and
    None of a single one.
    """

    mean: float
    stderr: float | None


def spread(split_size: int, sequences: int, seed: int) -> np.ndarray:
    """Return the held-out rows that are measured: int64 [min(split_size, sequences)], ascending.

    They are the images of 0, 1, ... under a permutation that the seed draws, so that each row is as
    likely as any other. It uses only integers, and so gives the same on every machine.

    `sequences` is `[held_out] sequences`, and `seed` `[peers] seed`.
    """
    if not (count := min(split_size, sequences)):
        return np.empty(0, np.int64)
    key = hashlib.sha256(f"held-out rows of seed {seed}".encode()).digest()
    return np.sort(permute(key, np.arange(count), split_size))


def drawn(split_size: int, run: runfile.Run) -> np.ndarray:
    """Return the rows that a run measures of a split, or half, of this size, see `spread`."""
    return spread(split_size, run.held_out.sequences, run.peers.seed)


def half(borders: Sequence[int], split_size: int, rows: str) -> range:
    """Return the rows of a split that `[held_out] rows` names: all, those to score, or to tune.

    `borders` are the first rows of its files. The halves meet at the one nearest to the middle, if
    it is in the middle half of the split, and in the middle otherwise.
    """
    near = (row for row in borders if split_size <= 4 * row <= 3 * split_size)
    border = min(near, key=lambda row: abs(2 * row - split_size), default=split_size // 2)
    first, stop = {"all": (0, split_size), "scoring": (0, border), "tuning": (border, split_size)}[
        rows
    ]
    return range(first, stop)


def read(run: runfile.Run, shards: Path) -> HeldOutRows:
    """Read `[held_out] sequences` rows spread over the split, and keep those where anything counts.

    Rows that are not tokens all count.
    """
    listed = read_shards(shards)
    length, network = run.llm.max_seq_len, run.runtime
    sequences = Sequences(shards, listed, "held_out", length, network)
    chosen = half(sequences.borders, len(sequences), run.held_out.rows)
    indices_N = drawn(len(chosen), run)
    rows_NW = sequences.take(chosen.start + indices_N)
    if listed.rows is None:
        counts_N = counted(rows_NW, listed.columns).any(axis=1)
        rows_NW, indices_N = rows_NW[counts_N], indices_N[counts_N]
    return HeldOutRows(rows_NW, listed.columns, indices_N, len(chosen))


def mean_of(
    losses_N: np.ndarray, weights_N: np.ndarray | None = None, documents_N: np.ndarray | None = None
) -> MeanLoss:
    """Return the weighted mean m of held-out rows' losses, and its standard error by clusters.

    stderr = sqrt(G / (G - 1) * sum_g (sum_{n in g} w_n * (loss_n - m))^2) / sum_n w_n

    Rows of one text are alike, and only the G clusters g are taken as independent: a
    cluster-robust standard error (Cameron and Miller, A Practitioner's Guide to Cluster-Robust
    Inference, J. Human Resources 50 (2015), for the mean; Cochran, Sampling Techniques, 1977, 2.11,
    for a ratio of sums).

    Args:
      losses_N: of at least one row, in the order of the split.
      weights_N: what counts in each row; None where they are equal.
      documents_N: number of the document that each row is of, the cluster; by default clusters are
        stretches of sqrt(N) neighbours, the batch means of Flegal and Jones (Annals of Statistics
        38, 2010).

    Raises:
      LockstepError: Nothing counts in any row.
    """
    losses_N = np.asarray(losses_N, np.float64)
    weights_N = np.ones(len(losses_N)) if weights_N is None else np.asarray(weights_N, np.float64)
    if not weights_N.any():
        raise LockstepError(
            f"held-out loss: nothing counts in any of {len(losses_N)} rows, expected rows with "
            "something to predict"
        )
    mean = float(np.average(losses_N, weights=weights_N))
    if documents_N is None:
        documents_N = np.arange(len(losses_N)) // math.isqrt(len(losses_N))
    cluster_N = np.unique(documents_N, return_inverse=True)[1]
    apart_G = np.bincount(cluster_N, weights_N * (losses_N - mean))
    if (count := len(apart_G)) == 1:
        return MeanLoss(mean, None)
    # fsum, since the digits of a product by BLAS differ between kinds of CPU
    error = math.sqrt(count / (count - 1) * math.fsum(apart_G**2)) / float(weights_N.sum())
    return MeanLoss(mean, error)


def mean_loss(
    measure: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]],
    rows_NW: np.ndarray,
    size: int,
    weights_N: np.ndarray | None = None,
) -> MeanLoss:
    """Return the mean held-out loss over all rows, and its standard error, see `mean_of`.

    `measure` returns the losses of the rows of each lot. All lots have `size` rows, since the last
    one is padded, so a single shape is compiled.
    """
    count = len(rows_NW)
    padded = np.pad(rows_NW, ((0, -count % size), (0, 0)))
    lots = padded.reshape(-1, size, rows_NW.shape[1])
    return mean_of(np.concatenate(measure(list(lots)))[:count], weights_N)


def weights_of(rows_NW: np.ndarray, columns: tuple[Column, ...]) -> np.ndarray | None:
    """Return the predictions that count in each held-out row, [N]; None if as many in each."""
    return counted(rows_NW, columns).sum(axis=1) if "labels" in columns else None


def exported_loss(model: Exported, data: HeldOutRows, peers: runfile.Peers) -> MeanLoss:
    """Return the held-out loss of an exported model on at least one row.

    `[peers]` says how many rows are measured at once, and on how many devices.
    """
    columns = data.columns

    def measure(params: Tree, rows_BW: jax.Array) -> jax.Array:
        rows = split(rows_BW, columns)
        kwargs = {"positions_BT": rows.position_ids, "sequences_BT": rows.sequence_ids}
        return measured(model.features(params, rows.inputs, **kwargs), model.head(params), rows)

    groups = device_groups(jax.devices(), peers.fsdp)
    params_on = {group: group.put(model.params) for group in groups}
    on_all = on_groups(jax.jit(model.by_rules(measure)), params_on)
    weights_N = weights_of(data.rows_NW, columns)
    return mean_loss(on_all, data.rows_NW, peers.micro_batch, weights_N)


def loss_numbers(loss: MeanLoss, data: HeldOutRows) -> dict[str, float | int | None]:
    """Return those of the held-out loss's `NUMBERS` that are known for any rows, tokens or not."""
    return {
        "held_out_loss": loss.mean,
        "held_out_stderr": loss.stderr,
        "sequences": len(data.rows_NW),
        "split_sequences": data.split_size,
    }


def numbers(
    loss: MeanLoss, data: HeldOutRows, tokenizer: Tokenizer | None, notes: list[str]
) -> dict[str, float | int | None]:
    """Return the numbers of metrics/evaluate.json that a held-out loss gives.

    `tokens` and `bytes` of the rows are those that are predicted. `notes` gains the reason if bits
    per byte are unknown.
    """
    rows_NW, columns = data.rows_NW, data.columns
    rows = split(rows_NW, columns)
    labels_NT = rows.inputs if rows.labels is None else rows.labels
    labels_P = labels_NT[:, 1:][counted(rows_NW, columns)]
    size = bytes_of(labels_P, tokenizer, notes)
    return loss_numbers(loss, data) | {
        "perplexity": float(np.exp(loss.mean)),
        "bits_per_byte": loss.mean * labels_P.size / math.log(2) / size if size else None,
        "tokens": labels_P.size,
        "bytes": size,
    }


def bytes_of(tokens_P: np.ndarray, tokenizer: Tokenizer | None, notes: list[str]) -> int | None:
    """Return the bytes of held-out text that these tokens stand for, or None if that is unknown.

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
    bytes_V = np.full(tokens_P.max() + 1, UNKNOWN_TOKEN)  # a tokenizer may have any larger id
    for token, index in vocabulary.items():
        if index < len(bytes_V):
            bytes_V[index] = len(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        if index < len(bytes_V):
            bytes_V[index] = 0 if added.special else len(added.content.encode())
    found_P = bytes_V[tokens_P]
    if (found_P == UNKNOWN_TOKEN).any():
        notes.append(
            f"token {tokens_P[found_P == UNKNOWN_TOKEN][0]} of the held-out split is not in the "
            "tokenizer, so bits per byte are unknown"
        )
        return None
    return int(found_P.sum())


def _decoders(tokenizer: Tokenizer) -> list[str]:
    """Return the kinds of the tokenizer's decoders, in order, to count held-out bytes."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    chain = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in chain]
