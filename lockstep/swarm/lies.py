"""A lying peer's messages: functions of messages, and of their bytes; one for each kind of fault.

A well-formed lie is a message like any other: its indices ascend within a block and are in range,
and its values are finite, so nobody can tell from it alone. `tamper` returns bytes that do not
decode, or not to what was committed to. All randomness is drawn from the given generator, so a run
repeats its lies.

A lie asks the leaf what its kind can do (`lockstep/wire/leaves`). Shapes: P other peers.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.wire import message as wire
from lockstep.wire.leaves import leaves_by
from lockstep.wire.leaves.leaf import Leaf

DRIFT_SEED = 0  # seed of a push's direction, the same in every round and for every peer


class Parameter(NamedTuple):
    """What a liar can see of one parameter."""

    true: Leaf  # its true message
    others: list[Leaf]  # the others' messages
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
    """Return the lie that is sent in place of the true message, in the same form.

    `kind` is one of `LIES`, `size` its strength; `areas` are as in `wire.Form`. A lone peer's
    `others` are its own message.
    """
    rows = zip(*(leaves_by(areas, other) for other in others or [message]), strict=True)
    parameters = [
        Parameter(leaf, list(row), number, size, rng)
        for number, (leaf, row) in enumerate(zip(leaves_by(areas, message), rows, strict=True))
    ]
    return _joined(LIES[kind](parameters), areas)


def tamper(
    kind: str, payload: bytes, message: Tree, form: wire.Form, rng: np.random.Generator
) -> bytes:
    """Return the lying peer's bytes that are sent in place of the payload of a message."""
    if kind == "malformed":  # a header, and too little after it
        return payload[: len(payload) // 2]
    return wire.encode(TAMPER[kind](message, form.areas, rng), form)


def _joined(leaves: list[Leaf], areas: Tree) -> Tree:
    return jax.tree.unflatten(jax.tree.structure(areas), [leaf.node for leaf in leaves])


# ---- Lies about one parameter ----


def _free_rider(p: Parameter) -> Leaf:
    """Return a lie without work: the first K indices, and zeros (positive as signs)."""
    nothing = np.zeros(p.true.values.shape)
    return p.true.moved(p.true.put(nothing)).with_values(nothing)


def _sign_flip(p: Parameter) -> Leaf:
    """Return the lie -q, for signs and values alike; indices unchanged."""
    return p.true.with_values(-p.true.values)


def _scaled(p: Parameter) -> Leaf:
    """Return the lie of values times the size: size * q."""
    return p.true.with_values(p.size * p.true.values)


def _noise(p: Parameter) -> Leaf:
    """Return the lie q + size * rms(q) * normal; a sign flips with probability min(1, size) / 2."""
    q = p.true.values
    if p.true.signs:  # size 1 thus leaves nothing of signs, and half of the power of values
        flips = p.rng.random(q.shape) < min(1.0, p.size) / 2
        return p.true.with_values(np.where(flips, -q, q))
    return p.true.with_values(q + p.size * _rms(q) * p.rng.standard_normal(q.shape))


def _opposite(p: Parameter) -> Leaf:
    """Return as a lie the others' negative mean: their inner product is as negative as possible.

    References:
      Xie, Koyejo, Gupta, Fall of Empires, https://arxiv.org/abs/1903.03936
    """
    return _selected(p.true, -_mean(p))


def _little_enough(p: Parameter) -> Leaf:
    """Return as a lie the others' mean - size * std for each coefficient; std over P, not P - 1.

    References:
      Baruch, Baruch, Goldberg, A Little Is Enough, https://arxiv.org/abs/1902.06156
    """
    mean = _mean(p)
    variance = sum((_spread(other) - mean) ** 2 for other in p.others) / len(p.others)
    return _selected(p.true, mean - p.size * np.sqrt(variance))


def _pushed(p: Parameter) -> Leaf:
    """Return a lie that pushes: q + size * rms(q) * d, with d = -1 or 1, the same every round."""
    rng = np.random.default_rng((DRIFT_SEED, p.number))
    q = p.true.values
    d = p.true.take(rng.integers(2, size=p.true.put(q).shape, dtype=np.int8))
    return p.true.with_values(q + p.size * _rms(q) * (2.0 * d - 1.0))


def _lone_index(p: Parameter) -> Leaf:
    """Return as a lie K positions that no other peer sends, with signs, the same every round.

    Where an element's mean is over its senders, a lone sender owns it. Positions come in one order,
    so the same ones are pushed round after round. Values have the true RMS.
    """
    if not p.true.kept:
        return p.true
    rng, shape = np.random.default_rng((DRIFT_SEED, p.number)), _spread(p.true).shape
    order, sign = rng.random(shape), rng.integers(2, size=shape)
    for other in p.others:  # behind all positions that nobody sends
        sent = other.put(np.ones(other.values.shape)) > 0
        order = np.where(sent, 1 + order % 1, order)
    leaf = p.true.moved(order)
    return leaf.with_values(_rms(p.true.values) * (2.0 * leaf.take(sign) - 1.0))


def _forged(p: Parameter) -> Leaf:
    """Return a forged message: drawn indices; signs by a coin, or normal values of the true RMS."""
    q, leaf = p.true.values, p.true
    if leaf.kept:
        leaf = leaf.moved(p.rng.random(leaf.put(q).shape))
    if leaf.signs:
        return leaf.with_values(np.where(p.rng.random(q.shape) < 0.5, -1, 1))
    return leaf.with_values(_rms(q) * p.rng.standard_normal(q.shape))


# ---- Lies about a message ----


def _each(change: Callable[[Parameter], Leaf]) -> Callable[[list[Parameter]], list[Leaf]]:
    return lambda message: [change(p) for p in message]


def _drift(message: list[Parameter]) -> list[Leaf]:
    """Return a lie too small for any threshold, a push; among signs, a single flipped sign."""
    sizes = [p.true.values.size if p.true.signs else 0 for p in message]
    if not any(sizes):
        return [_pushed(p) for p in message]
    ends, leaves = np.cumsum(sizes), [p.true for p in message]
    at = int(message[0].rng.integers(ends[-1]))
    number = int(np.searchsorted(ends, at, side="right"))
    values = leaves[number].values
    values.flat[at - ends[number]] *= -1  # counted from the parameter's end
    leaves[number] = leaves[number].with_values(values)
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
    """Return a lie with NaN at a random position of each parameter, and infinity at another."""

    def spoiled(leaf: Leaf) -> Leaf:
        if not leaf.sized:
            return leaf
        raw = np.array(leaf.raw)
        chosen = rng.choice(raw.size, min(2, raw.size), replace=False)
        raw.flat[chosen] = (np.nan, np.inf)[: len(chosen)]
        return leaf.with_raw(raw)

    return _joined([spoiled(leaf) for leaf in leaves_by(areas, message)], areas)


def _duplicated(message: Tree, areas: Tree, rng: np.random.Generator) -> Tree:
    """Return a lie with the first index twice in a block, of the parameter that sends most."""
    leaves = leaves_by(areas, message)
    number = int(np.argmax([leaf.kept for leaf in leaves]))
    if leaves[number].kept < 2:
        raise LockstepError(
            "faults.schedule: duplicated, expected messages with at least two indices of a block"
        )
    node = leaves[number].node
    index_NK = np.array(node.index_NK)
    block = rng.integers(len(index_NK))
    index_NK[block, 1] = index_NK[block, 0]
    leaves[number].node = node._replace(index_NK=index_NK)
    return _joined(leaves, areas)


def _wrong_hash(message: Tree, areas: Tree, rng: np.random.Generator) -> Tree:
    """Return another message as a lie, well-formed: only its hash shows it."""
    return lie("forged", None, message, (), areas, rng)


TAMPER: dict[str, Callable[[Tree, Tree, np.random.Generator], Tree]] = {
    "not_finite": _not_finite,
    "duplicated": _duplicated,
    "wrong_hash": _wrong_hash,
}


# ---- Parts ----


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _spread(leaf: Leaf) -> Any:
    """Return a parameter's message as a whole array for a lie, zero where nothing is sent."""
    return leaf.put(leaf.values)


def _mean(p: Parameter) -> Any:
    """Return the mean over all others, for a lie, in peer order; an unsent index counts as zero."""
    return sum(map(_spread, p.others)) / len(p.others)


def _selected(like: Leaf, values: Any) -> Leaf:
    """Select a lie's positions as a peer would: the K largest, ties to the lowest index."""
    leaf = like.moved(-np.abs(values))
    return leaf.with_values(leaf.take(values))
