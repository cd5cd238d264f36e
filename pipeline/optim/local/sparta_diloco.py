"""SPARTA-DiLoCo: peers average a few params in each round, and all of them by an outer step."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from pipeline.optim.dense import TINY, weighted_mean
from pipeline.optim.expect import expect_counts, expect_decay, expect_kind, expect_rates
from pipeline.optim.local.fragments import fragment_of, init_of_each, put, put_row, row, take
from pipeline.optim.optimizer import Optimizer, RoundPeers, Tree
from pipeline.optim.sgd import sgd


class TwoParts(NamedTuple):
    """A message of `sparta_diloco`, or its areas.

    Attributes:
      places: What SPARTA sends.
      fragment: The peer's pseudogradient of the round's fragment.
    """

    places: Tree
    fragment: Tree


class OuterState(NamedTuple):
    """What is one copy in `sparta_diloco`.

    Attributes:
      anchor: The params after their last outer steps; shapes of the params, float32.
      outer: `shared` of the outer optimizer, of each fragment.
    """

    anchor: Tree
    outer: Tree


def sparta_diloco(
    sparse: Optimizer,
    *,
    outer_every: int,
    outer_learning_rate: float,
    outer_momentum: float,
    nesterov: bool,
) -> Optimizer:
    """Return SPARTA, whose params take an outer step of DiLoCo every `outer_every` rounds.

    With the names of `sparta` and `diloco`, F = outer_every and f = (t - 1) mod F, in round t:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        theta[S]  <- mean over peers of theta_p[S]
        D       = anchor[f] - mean over peers of theta_p[f]
        m[f]   <- outer_momentum * m[f] + D
        theta[f]  <- anchor[f] - outer_learning_rate * (D + outer_momentum * m[f])
        anchor[f] <- theta[f]
        theta_p[S and f] <- theta[S and f]

    Fragment f is the f-th of F equal ranges of each parameter. So each element takes an outer step
    every F rounds, and all messages are alike: (theta - theta_p) in S and in f, float32, which is
    4 * (share + 1 / F) bytes per parameter. In EXO Gym all params are exchanged at once, in every
    F-th round; in F rounds that is as many bytes.

    Args:
      sparse: What it is without outer steps, as `sparta` makes it.
      outer_every: Rounds from one outer step of an element to its next.
      outer_learning_rate: Of the outer step, constant.
      outer_momentum: Decay of m per outer step, in [0, 1).
      nesterov: Whether the momentum is Nesterov's, as above; without it, the step is m[f].

    References:
      Baioumy, Cheema, SPARTA: Distributed Training with Sparse Parameter Averaging,
        https://openreview.net/forum?id=stFPf3gzq1
    """
    expect_kind(Optimizer, sparse=sparse)
    expect_counts(outer_every=outer_every)
    expect_rates(outer_learning_rate=outer_learning_rate)
    expect_decay("outer_momentum", outer_momentum)
    outer = sgd(outer_learning_rate, momentum=outer_momentum, nesterov=nesterov)
    take_one, put_one = partial(take, fragments=outer_every), partial(put, fragments=outer_every)

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, _ = sparse.init(params)
        # a copy: whoever steps may donate the state and keep the params
        anchor = jax.tree.map(lambda theta: jnp.array(theta, jnp.float32, copy=True), params)
        return own, OuterState(anchor, init_of_each(outer, params, outer_every)[1])

    def far(own: Tree, number: jax.Array) -> Tree:
        """Return (theta - theta_p)[f]."""
        return jax.tree.map(jnp.negative, take_one(own.drift, number))

    def after_sending(own: Tree, number: jax.Array) -> Tree:
        still = jax.tree.map(jnp.zeros_like, take_one(own.drift, number))
        return own._replace(drift=put_one(own.drift, still, number))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        number = fragment_of(step, outer_every)
        places, after = sparse.send(own, params, shared, step)
        return TwoParts(places, far(own, number)), after_sending(after, number)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        number = fragment_of(step, outer_every)
        here, anchor = take_one(params, number), take_one(shared.anchor, number)
        mean = weighted_mean(messages.fragment, peers.weight)
        pseudogradient = jax.tree.map(lambda a, x, d: (a - x + d)[None], anchor, here, mean)
        one, state = RoundPeers.synchronous(jnp.ones(1, jnp.int32)), row(shared.outer, number)
        moves, state = outer.receive(pseudogradient, one, anchor, state, step)
        anchor = jax.tree.map(jnp.add, anchor, moves)

        updates, _ = sparse.receive(messages.places, peers, params, shared, step)
        updates = put_one(updates, jax.tree.map(jnp.subtract, anchor, here), number)
        anchors = put_one(shared.anchor, anchor, number)
        return updates, OuterState(anchors, put_row(shared.outer, state, number))

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        number = fragment_of(step, outer_every)
        mine = far(own, number)
        off = optax.tree.norm(jax.tree.map(jnp.subtract, message.fragment, mine))
        distance, after = sparse.compare(own, message.places, params, step)
        distance = jnp.maximum(distance, off / (optax.tree.norm(mine) + TINY))
        return distance, after_sending(after, number)

    def areas(params: Tree) -> Tree:
        return TwoParts(*[sparse.areas(params)] * 2)

    return sparse._replace(init=init, send=send, receive=receive, compare=compare, areas=areas)
