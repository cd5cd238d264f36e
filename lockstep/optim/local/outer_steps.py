"""Outer steps on pseudogradients, some of which are old: the params moved on as they travelled.

SGD with Nesterov's momentum is `outer_sgd`; it treats a pseudogradient of any age like a new one.
Learning rates are schedules of the round, counted from 1, or constants; an `aggregate` says how the
peers' pseudogradients become one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.optim import expect
from lockstep.optim.aggregation import AggregateFn, counts_each_once, mean
from lockstep.optim.dense import adam, dense
from lockstep.optim.directions import LENGTH_UNIT, Sized, inverse
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree


class DelayedMomentum(NamedTuple):
    """The shared state of the outer optimizer `delayed_nesterov`.

    Attributes:
      momentum: m; shapes of the params.
      gathered: Sum of the pseudogradients since m last took some in.
      merges: int32 [], how many these are.
    """

    momentum: Tree
    gathered: Tree
    merges: jax.Array


def delayed_nesterov(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float,
    every: int,
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return outer SGD whose Nesterov momentum acts, and changes, only once in `every` merges.

    With D the merged pseudogradient of a round and S the sum of those since m last changed:

        theta <- theta - learning_rate * D / every                           but in each every-th:
        m     <- momentum * m + (S + D) / every
        theta <- theta - learning_rate * (D / every + momentum * m)

    So momentum is applied once for `every` merges, however few peers each of them has. With
    every = 1 it is `outer_sgd` with Nesterov's momentum. It is the paper's with c = 0; `every` is
    its N.

    References:
      Liu et al., Asynchronous Local-SGD Training for Language Modeling,
        https://arxiv.org/abs/2401.09135
    """
    expect.decay("momentum", momentum)
    expect.counts(every=every)

    def init(params: Tree) -> DelayedMomentum:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DelayedMomentum(zeros, jax.tree.map(jnp.copy, zeros), jnp.zeros((), jnp.int32))

    def update(
        updates: Tree, state: optax.OptState, params: Tree | None = None
    ) -> tuple[Tree, DelayedMomentum]:
        m, gathered, merges = state
        due = (merges + 1) % every == 0
        gathered = jax.tree.map(jnp.add, gathered, updates)
        new = jax.tree.map(lambda m, s: momentum * m + s / every, m, gathered)
        moves = jax.tree.map(
            lambda d, m: d / every + jnp.where(due, momentum * m, 0.0), updates, new
        )
        m = jax.tree.map(lambda new, m: jnp.where(due, new, m), new, m)
        gathered = jax.tree.map(lambda s: jnp.where(due, 0.0, s), gathered)
        return moves, DelayedMomentum(m, gathered, (merges + 1) % every)

    direction = optax.GradientTransformation(init, update)
    return dense(learning_rate, direction, aggregate=aggregate)


def cgad(
    learning_rate: optax.ScalarOrSchedule,
    *,
    betas: tuple[float, float],
    eps: float,
    alpha: float,
    cutoff: float,
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return outer Adam on pseudogradients that count by their age: Cosine-Gated Adam-Decay.

    With D_p the pseudogradient of peer p, and a_p its age in versions:

        D      = aggregate over peers of D_p, by the weights w_p * s(a_p)
        s(a)   = (1 + cos(pi * a / cutoff)) / 2 * exp(-alpha * a)     below the cutoff, then 0
        theta <- theta - learning_rate * (Adam's direction of D)

    w_p is the peer's weight. So an old message counts less beside a new one, whatever the rule
    makes of lengths; where all are of one age it is Adam. A rule that counts each sender once, as
    the median, is refused: it would take an old message for a new one. The accessible part of the
    paper has neither the gate's formula nor defaults for alpha and the cutoff; half a cosine is
    what the name suggests.

    References:
      Shah, Sun, Cosine-Gated Adam-Decay: Drop-In Staleness-Aware Outer Optimization for Decoupled
        DiLoCo, https://arxiv.org/abs/2605.09126
    """
    expect.rates(alpha=alpha)
    expect.number("cutoff", cutoff, lambda x: x > 0, "a number above 0")
    if counts_each_once(aggregate):
        raise ValueError(
            "aggregate gives every sender the same weight, expected a weighted rule, such as mean"
        )
    base = dense(learning_rate, adam(betas, eps), aggregate=aggregate)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        gate_P = 0.5 * (1.0 + jnp.cos(jnp.pi * peers.age / cutoff))
        factor_P = jnp.where(peers.age < cutoff, gate_P * jnp.exp(-alpha * peers.age), 0.0)
        weight_P = peers.weight * factor_P
        largest = jnp.max(weight_P)  # rules take weights of 1 and more for whole peers
        weight_P = weight_P / jnp.where(largest > 0, largest, 1.0)
        aged = peers._replace(weight=weight_P)
        return base.receive(messages, aged, params, shared, step)

    return base._replace(receive=receive, merge=None)


def heloco(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float,
    keep: float,
    shrink: float,
    shrink_most: float,
    turn: float,
    trust: float,
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return outer SGD with Nesterov momentum, towards which pseudogradients are turned.

    Parameter by parameter, with D the pseudogradient of a peer, m the momentum, v = m / ||m||,
    c = cos(D, m) and conf = ||D|| / (||D|| + trust * ||m||):

        c >= keep    D stays as it is
        c < 0        D - b * c * ||D|| * v             b = min(shrink * -c * conf, shrink_most)
        else         D turned to (1 - l) * D / ||D|| + l * v, its norm kept
                                                       l = min(turn * (1 - c) * conf, 1)

        G      = aggregate over peers of these
        m     <- momentum * m + (1 - momentum) * G
        theta <- theta - learning_rate * (G + momentum * m)

    If m is 0, as before the first merge, D stays as it is. Here a parameter is a fragment's part
    of it; the paper's delay weight is 1.

    In the paper, keep is c_ok, shrink k_s, shrink_most beta_max, turn k_d, and trust kappa: a
    pseudogradient whose norm is `trust` times the momentum's is corrected half as far.

    References:
      Al Asif et al., HeLoCo: Efficient asynchronous low-communication training under data and
        device heterogeneity, https://arxiv.org/abs/2606.00271
    """
    expect.decay("momentum", momentum)
    expect.share("keep", keep)
    expect.share("shrink_most", shrink_most)
    expect.rates(shrink=shrink, turn=turn, trust=trust)

    def update(
        updates: Tree, state: optax.OptState, params: Tree | None = None
    ) -> tuple[Tree, Tree]:
        m = jax.tree.map(lambda m, g: momentum * m + (1.0 - momentum) * g, state, updates)
        return jax.tree.map(lambda g, m: g + momentum * m, updates, m), m

    direction = optax.GradientTransformation(optax.tree.zeros_like, update)
    base = dense(learning_rate, direction, aggregate=aggregate)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        def turn_leaf(x: jax.Array, m: jax.Array) -> jax.Array:
            settings = {"keep": keep, "shrink": shrink, "shrink_most": shrink_most}
            return jax.vmap(lambda row: _turned(row, m, **settings, turn=turn, trust=trust))(x)

        turned = jax.tree.map(turn_leaf, messages, shared)
        return base.receive(turned, peers, params, shared, step)

    return base._replace(receive=receive, merge=None)


def _turned(
    x: jax.Array, m: jax.Array, *,
    keep: float, shrink: float, shrink_most: float, turn: float, trust: float,
) -> jax.Array:  # fmt: skip
    """Return a pseudogradient of one parameter, turned towards the outer momentum."""
    sized, momentum = Sized(x, (*range(x.ndim),)), Sized(m, (*range(m.ndim),))
    length, m_length = sized.length, momentum.length  # in units of `LENGTH_UNIT`
    u, v = sized.direction, momentum.direction
    c = jnp.sum(u * v)
    conf = length * inverse(length + trust * m_length)
    b = jnp.minimum(shrink * -c * conf, shrink_most)
    shrunk = x - b * c * length * (LENGTH_UNIT * v)
    share = jnp.minimum(turn * (1.0 - c) * conf, 1.0)
    mixed = (1.0 - share) * u + share * v
    turned = length * (LENGTH_UNIT * mixed) * inverse(jnp.linalg.norm(mixed.ravel()))
    unchanged = (c >= keep) | (m_length == 0) | (length == 0)
    return jnp.where(unchanged, x, jnp.where(c < 0, shrunk, turned))
