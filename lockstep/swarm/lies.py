"""A lying peer's messages: functions of messages, and of their bytes; one for each kind of fault.

A well-formed lie is a message like any other: its indices ascend within a block and are in range,
and its values are finite, so nobody can tell from it alone. `tamper` returns bytes that do not
decode, or not to what was committed to. All randomness is drawn from the given generator, so a run
repeats its lies.

Shapes: P other peers, N blocks of a parameter, K coefficients kept of each, A positions in a block.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.compressed.compressor import Coefficients
from lockstep.optim.optimizer import Tree
from lockstep.wire import message as wire

DRIFT_SEED = 0  # seed of a push's direction, the same in every round and for every peer

Leaf = Coefficients | np.ndarray


class Parameter(NamedTuple):
    """What a liar can see of one parameter."""

    true: Leaf  # its true message
    others: list[Leaf]  # the others' messages
    area: int  # A; 0 for a whole array
    number: int  # the parameter's index in the message
    size: float | None  # strength of the fault
    rng: np.random.Generator


def lie(
    kind: str,
    size: float | None,
    message: Tree,
    others: Sequence[Tree],
    areas: Tree,
    rng: np.random.Generator,
) -> Tree:
    """Return the message that is sent in place of the true one, in the same form.

    `kind` is one of `LIES`, `size` its strength; `areas` are as in `wire.Form`. A lone peer's
    `others` are its own message.
    """
    leaves, structure = jax.tree.flatten(message, is_leaf=_is_sparse)
    rows = zip(*(structure.flatten_up_to(other) for other in others or [message]), strict=True)
    parameters = [
        Parameter(leaf, list(row), area, number, size, rng)
        for number, (leaf, row, area) in enumerate(
            zip(leaves, rows, jax.tree.leaves(areas), strict=True)
        )
    ]
    return structure.unflatten(LIES[kind](parameters))


def tamper(
    kind: str, payload: bytes, message: Tree, form: wire.Form, rng: np.random.Generator
) -> bytes:
    """Return the bytes that are sent in place of the payload of a message."""
    if kind == "malformed":  # a header, and too little after it
        return payload[: len(payload) // 2]
    return wire.encode(TAMPER[kind](message, form.areas, rng), form)


# ---- Lies about one parameter ----


def _free_rider(p: Parameter) -> Leaf:
    """Return a message without work: the first K indices, and zeros (positive as signs)."""
    if not _is_sparse(p.true):
        return np.zeros_like(p.true)
    index_K = np.arange(p.true.index_NK.shape[1], dtype=p.true.index_NK.dtype)
    index_NK = np.broadcast_to(index_K, p.true.index_NK.shape).copy()
    return Coefficients(index_NK, np.zeros_like(p.true.value_NK))


def _sign_flip(p: Parameter) -> Leaf:
    """-q, for signs and values alike; indices unchanged."""
    if _is_signs(p.true):
        return p.true._replace(value_NK=~np.asarray(p.true.value_NK))
    return with_values(p.true, -values_of(p.true))


def _scaled(p: Parameter) -> Leaf:
    """Return the values times the size: size * q."""
    exact = _is_signs(p.true) or _is_bits(p.true)
    return p.true if exact else with_values(p.true, p.size * values_of(p.true))


def _noise(p: Parameter) -> Leaf:
    """Noise: q + size * rms(q) * normal; a sign flips with probability min(1, size) / 2.

    Size 1 thus leaves nothing of signs, and half of the power of values.
    """
    if _is_signs(p.true):
        flips = p.rng.random(p.true.value_NK.shape) < min(1.0, p.size) / 2
        return p.true._replace(value_NK=np.asarray(p.true.value_NK) ^ flips)
    q = values_of(p.true)
    return with_values(p.true, q + p.size * _rms(q) * p.rng.standard_normal(q.shape))


def _opposite(p: Parameter) -> Leaf:
    """The others' negative mean: their inner product is as negative as possible.

    References:
      Xie, Koyejo, Gupta, Fall of Empires, https://arxiv.org/abs/1903.03936
    """
    return _selected(p.true, -_mean(p))


def _little_enough(p: Parameter) -> Leaf:
    """The others' mean - size * std for each coefficient; std over P, not P - 1.

    References:
      Baruch, Baruch, Goldberg, A Little Is Enough, https://arxiv.org/abs/1902.06156
    """
    mean = _mean(p)
    variance = sum((_spread(other, p.area) - mean) ** 2 for other in p.others) / len(p.others)
    return _selected(p.true, mean - p.size * np.sqrt(variance))


def _pushed(p: Parameter) -> Leaf:
    """A push: q + size * rms(q) * d, with d = -1 or 1 for each index, the same every round."""
    q, rng = values_of(p.true), np.random.default_rng((DRIFT_SEED, p.number))
    if _is_sparse(p.true):
        d_NA = rng.integers(2, size=(len(q), p.area), dtype=np.int8)
        d = np.take_along_axis(d_NA, _indices(p.true), axis=1)
    else:
        d = rng.integers(2, size=q.shape, dtype=np.int8)
    return with_values(p.true, q + p.size * _rms(q) * (2.0 * d - 1.0))


def _lone_index(p: Parameter) -> Leaf:
    """K positions that no other peer sends, and a sign for each, the same every round.

    Where an element's mean is over its senders, a lone sender owns it. Positions come in one order,
    so the same ones are pushed round after round. Values have the true RMS.
    """
    if not _is_sparse(p.true):
        return p.true
    blocks, count = p.true.index_NK.shape
    rng = np.random.default_rng((DRIFT_SEED, p.number))
    order_NA, sign_NA = rng.random((blocks, p.area)), rng.integers(2, size=(blocks, p.area))
    for other in p.others:  # behind all positions that nobody sends
        at_NK = _indices(other)
        later_NK = 1 + np.take_along_axis(order_NA, at_NK, axis=1) % 1
        np.put_along_axis(order_NA, at_NK, later_NK, axis=1)
    index_NK = np.sort(np.argpartition(order_NA, count - 1, axis=1)[:, :count], axis=1)
    leaf = p.true._replace(index_NK=index_NK.astype(p.true.index_NK.dtype))
    size = 1.0 if _is_signs(p.true) else _rms(values_of(p.true))
    return with_values(leaf, size * (2.0 * np.take_along_axis(sign_NA, index_NK, axis=1) - 1.0))


def _forged(p: Parameter) -> Leaf:
    """Indices drawn uniformly; signs by a coin, or normal values of the true RMS."""
    if not _is_sparse(p.true):
        q = values_of(p.true)
        return with_values(p.true, _rms(q) * p.rng.standard_normal(q.shape))
    blocks, count = p.true.index_NK.shape
    drawn_NA = p.rng.random((blocks, p.area))
    index_NK = np.sort(np.argpartition(drawn_NA, count - 1, axis=1)[:, :count], axis=1)
    leaf = p.true._replace(index_NK=index_NK.astype(p.true.index_NK.dtype))
    if _is_signs(p.true):
        return leaf._replace(value_NK=p.rng.random((blocks, count)) < 0.5)
    return with_values(leaf, _rms(values_of(p.true)) * p.rng.standard_normal((blocks, count)))


# ---- Lies about a message ----


def _each(change: Callable[[Parameter], Leaf]) -> Callable[[list[Parameter]], list[Leaf]]:
    return lambda message: [change(p) for p in message]


def _drift(message: list[Parameter]) -> list[Leaf]:
    """A push too small for any threshold; among signs, a single flipped sign."""
    sizes = [p.true.value_NK.size if _is_signs(p.true) else 0 for p in message]
    if not any(sizes):
        return [_pushed(p) for p in message]
    ends, leaves = np.cumsum(sizes), [p.true for p in message]
    at = int(message[0].rng.integers(ends[-1]))
    number = int(np.searchsorted(ends, at, side="right"))
    value_NK = np.array(leaves[number].value_NK)
    value_NK.flat[at - ends[number]] ^= True  # counted from the parameter's end
    leaves[number] = leaves[number]._replace(value_NK=value_NK)
    return leaves


LIES: dict[str, Callable[[list[Parameter]], list[Leaf]]] = {
    "free_rider": _each(_free_rider),
    "sign_flip": _each(_sign_flip),
    "scale_up": _each(_scaled),
    "scale_down": _each(_scaled),
    "noise": _each(_noise),
    "opposite": _each(_opposite),
    "little_enough": _each(_little_enough),
    "drift": _drift,
    "lone_index": _each(_lone_index),
    "forged": _each(_forged),
}


# ---- Bytes ----


def _not_finite(message: Tree, areas: Tree, rng: np.random.Generator) -> Tree:
    """NaN at a random position of each parameter, and infinity at another."""

    def spoil(leaf: Leaf) -> Leaf:
        if _is_signs(leaf) or _is_bits(leaf):
            return leaf
        values = np.array(leaf.value_NK if _is_sparse(leaf) else leaf)
        chosen = rng.choice(values.size, min(2, values.size), replace=False)
        values.flat[chosen] = (np.nan, np.inf)[: len(chosen)]
        return leaf._replace(value_NK=values) if _is_sparse(leaf) else values

    return jax.tree.map(spoil, message, is_leaf=_is_sparse)


def _duplicated(message: Tree, areas: Tree, rng: np.random.Generator) -> Tree:
    """The first index twice in one block, of the parameter that sends the most of a block."""
    leaves, structure = jax.tree.flatten(message, is_leaf=_is_sparse)
    counts = [leaf.index_NK.shape[1] if _is_sparse(leaf) else 0 for leaf in leaves]
    number = int(np.argmax(counts))
    if counts[number] < 2:
        raise LockstepError(
            "faults.schedule: duplicated, expected messages with at least two indices of a block"
        )
    index_NK = np.array(leaves[number].index_NK)
    block = rng.integers(len(index_NK))
    index_NK[block, 1] = index_NK[block, 0]
    leaves[number] = leaves[number]._replace(index_NK=index_NK)
    return structure.unflatten(leaves)


def _wrong_hash(message: Tree, areas: Tree, rng: np.random.Generator) -> Tree:
    """Another message, well-formed: only its hash shows that it is not the one committed to."""
    return lie("forged", None, message, (), areas, rng)


TAMPER: dict[str, Callable[[Tree, Tree, np.random.Generator], Tree]] = {
    "not_finite": _not_finite,
    "duplicated": _duplicated,
    "wrong_hash": _wrong_hash,
}


# ---- Parts ----


def _is_sparse(node: object) -> bool:
    return isinstance(node, Coefficients)


def _is_signs(leaf: Leaf) -> bool:
    return _is_sparse(leaf) and leaf.value_NK.dtype == bool


def _indices(leaf: Coefficients) -> np.ndarray:
    return np.asarray(leaf.index_NK).astype(np.int64)


def _is_bits(leaf: Leaf) -> bool:
    return not _is_sparse(leaf) and leaf.dtype == np.uint8


def values_of(leaf: Leaf) -> np.ndarray:
    """Return a parameter's values in float64; a sign, and each bit of a code, is -1 or 1."""
    if _is_signs(leaf):
        return np.where(leaf.value_NK, -1.0, 1.0)
    if _is_bits(leaf):
        return np.where(np.unpackbits(np.asarray(leaf)), -1.0, 1.0)
    return np.asarray(leaf.value_NK if _is_sparse(leaf) else leaf).astype(np.float64)


def with_values(leaf: Leaf, values: np.ndarray) -> Leaf:
    """Return `leaf` with other values: as signs or bits, or rounded and clipped to its dtype."""
    if _is_signs(leaf):
        return leaf._replace(value_NK=values < 0)
    if _is_bits(leaf):
        return np.packbits(values < 0).reshape(leaf.shape)
    dtype = (leaf.value_NK if _is_sparse(leaf) else leaf).dtype
    limit = float(jnp.finfo(dtype).max)
    values = np.clip(values, -limit, limit).astype(dtype)
    return leaf._replace(value_NK=values) if _is_sparse(leaf) else values


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _spread(leaf: Leaf, area: int) -> np.ndarray:
    """Return a parameter's message as a whole array: [N, A], zero where nothing is sent."""
    if not _is_sparse(leaf):
        return values_of(leaf)
    whole_NA = np.zeros((len(leaf.index_NK), area))
    np.put_along_axis(whole_NA, _indices(leaf), values_of(leaf), axis=1)
    return whole_NA


def _mean(p: Parameter) -> np.ndarray:
    """Return the mean over all others, in peer order; an unsent index counts as zero."""
    return sum(_spread(other, p.area) for other in p.others) / len(p.others)


def _selected(like: Leaf, values: np.ndarray) -> Leaf:
    """Select as a peer would: the K largest magnitudes of each block, ties to the lowest index."""
    if not _is_sparse(like):
        return with_values(like, values)
    count = like.index_NK.shape[1]
    index_NK = np.argsort(-np.abs(values), axis=1, kind="stable")[:, :count]
    index_NK = np.sort(index_NK, axis=1)
    leaf = like._replace(index_NK=index_NK.astype(like.index_NK.dtype))
    return with_values(leaf, np.take_along_axis(values, index_NK, axis=1))
