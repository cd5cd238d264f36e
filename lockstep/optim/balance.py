"""Params that no gradient moves: left as they are, or moved by the load of experts."""

from collections.abc import Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from lockstep.optim import expect
from lockstep.optim.aggregation import mean
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree, inside, no_align, no_lookahead


def leave(optimizer: Optimizer, paths: Collection[str]) -> Optimizer:
    """Return `optimizer` for all params except some, which stay as they are and are never sent.

    `paths` are the names of the params that stay as they are, joined with "/".
    """
    expect.kind(Optimizer, optimizer=optimizer)
    expect.groups(paths=paths)

    def others(tree: Tree) -> Tree:
        flat = flatten_dict(tree, sep="/")
        return unflatten_dict({p: x for p, x in flat.items() if p not in paths}, sep="/")

    def rejoin(tree: Tree, params: Tree) -> Tree:
        return unflatten_dict(flatten_dict(params) | flatten_dict(tree))

    def init(params: Tree) -> tuple[Tree, Tree]:
        return optimizer.init(others(params))

    def align(own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        return optimizer.align(own, others(params), fragment)

    def ahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        return rejoin(optimizer.lookahead(others(params), own, shared, step), params)

    lookahead = ahead if optimizer.looks_ahead else no_lookahead

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return optimizer.accumulate(others(grads), own, others(params), step)

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        return optimizer.send(own, others(params), shared, step)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        updates, shared = optimizer.receive(messages, peers, others(params), shared, step)
        return rejoin(updates, jax.tree.map(jnp.zeros_like, params)), shared

    def areas(params: Tree) -> Tree:
        return optimizer.areas(others(params))

    return optimizer._replace(
        init=init, lookahead=lookahead, accumulate=accumulate, send=send, receive=receive,
        areas=areas, align=align if optimizer.aligns else no_align,
        merge=None,
    )  # fmt: skip


class Balanced(NamedTuple):
    """A state, a message or areas of `balanced`: the other params', and the load of experts.

    Attributes:
      load: How often each expert was chosen; shapes of the corrections.
      optimizer: State, message or areas of the optimizer of the other params.
    """

    load: Tree
    optimizer: Tree


def balanced(optimizer: Optimizer, paths: Collection[str], speed: float) -> Optimizer:
    """Return `optimizer` with routers' corrections, which balance experts without a loss term.

    DeepSeek V3 does so. In place of its gradient, a correction b gets a load n_p: how often peer
    p's batch chose each of its E experts (`models.experts.Router`). A peer sends it whole, and

        s   =  mean over present peers of n_p / (sum over experts of n_p)
        b  <-  b + speed * sign(mean over experts of s - s)

    so that an expert with less than its share is chosen more often. Peers count by their weights,
    as with their gradients.

    The optimizer takes the other params, as `leave` makes it. `paths` are the names of corrections,
    joined with "/", whose last axis is experts. DeepSeek V3 trained with a speed of 0.001.

    References:
      Wang et al., Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts,
        https://arxiv.org/abs/2408.15664
    """
    expect.kind(Optimizer, optimizer=optimizer)
    expect.groups(paths=paths)
    expect.rates(speed=speed)

    def corrections(tree: Tree) -> Tree:
        flat = flatten_dict(tree, sep="/")
        return unflatten_dict({path: flat[path] for path in paths}, sep="/")

    def zeros(load: Tree) -> Tree:
        return jax.tree.map(jnp.zeros_like, load)

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        return Balanced(zeros(corrections(params)), own), shared

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        load = jax.tree.map(jnp.add, own.load, corrections(grads))
        return Balanced(load, optimizer.accumulate(grads, own.optimizer, params, step))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message, state = optimizer.send(own.optimizer, params, shared, step)
        return Balanced(own.load, message), Balanced(zeros(own.load), state)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        updates, shared = optimizer.receive(messages.optimizer, peers, params, shared, step)
        moves = _moves(messages.load, peers.weight, speed)
        return unflatten_dict(flatten_dict(updates) | flatten_dict(moves)), shared

    def areas(params: Tree) -> Tree:
        return Balanced(jax.tree.map(lambda _: 0, corrections(params)), optimizer.areas(params))

    return inside(optimizer)._replace(
        init=init, accumulate=accumulate, send=send, receive=receive, areas=areas,
        merge=None,
    )  # fmt: skip


def _moves(load: Tree, weight: jax.Array, speed: float) -> Tree:
    """Return what balancing adds to corrections; loads have a leading axis [peer], as `weight`."""

    def move(share: jax.Array) -> jax.Array:
        return speed * jnp.sign(jnp.mean(share, axis=-1, keepdims=True) - share)

    return jax.tree.map(move, mean(jax.tree.map(_share, load), weight))


def _share(load: jax.Array) -> jax.Array:
    """Return each expert's share of the choices of the load, never negative, whatever was sent."""
    load = jnp.maximum(load, 0.0)
    return load / jnp.maximum(jnp.sum(load, axis=-1, keepdims=True), 1.0)
