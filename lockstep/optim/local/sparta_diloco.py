"""SPARTA-DiLoCo: peers average a few params in each round, and all of them by an outer step."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.optim.aggregation.aggregate import AggregateFn, mean
from lockstep.optim.expect import expect_aggregate, expect_counts, expect_kind
from lockstep.optim.local.fragments import Fragments, put_row, row
from lockstep.optim.optimizer import SMALLEST_NORMAL, Optimizer, RoundPeers, Tree


class TwoParts(NamedTuple):
    """A message of `sparta_diloco`, or its areas.

    Attributes:
      places: Message of SPARTA.
      fragment: The peer's pseudogradient of the round's fragment.
    """

    places: Tree
    fragment: Tree


class OuterState(NamedTuple):
    """The shared state of `sparta_diloco`.

    Attributes:
      anchor: The params after their last outer steps; shapes of the params, float32.
      outer: `shared` of the outer optimizer, of each fragment.
    """

    anchor: Tree
    outer: Tree


def sparta_diloco(
    sparse: Optimizer, outer: Optimizer, *, outer_every: int, aggregate: AggregateFn = mean
) -> Optimizer:
    """Return SPARTA, whose params take an outer step of DiLoCo every `outer_every` rounds.

    With the names of `sparta` and `diloco`, F = outer_every and f = (t - 1) mod F, in round t:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        theta[S]  <- mean over peers of theta_p[S]
        D       = anchor[f] - mean over peers of theta_p[f]
        m[f]   <- momentum * m[f] + D
        theta[f]  <- anchor[f] - learning_rate * (D + momentum * m[f])
        anchor[f] <- theta[f]
        theta_p[S and f] <- theta[S and f]

    Fragment f is the f-th of F equal ranges of each parameter. So each element takes an outer step
    every F rounds, and all messages are alike: (theta - theta_p) in S and in f, float32, which is
    4 * (share + 1 / F) bytes per parameter. In EXO Gym all params are exchanged at once, in every
    F-th round; in F rounds that is as many bytes.

    Args:
      sparse: SPARTA without outer steps, as `sparta` makes it.
      outer: Takes the step of a fragment, such as `sgd` with momentum. Its gradient is D, as if
        from one peer.
      outer_every: Rounds from one outer step of an element to its next.
      aggregate: Takes the place of the mean in D; that of theta[S] is an argument of `sparta`.

    References:
      Baioumy, Cheema, SPARTA: Distributed Training with Sparse Parameter Averaging,
        https://openreview.net/forum?id=stFPf3gzq1
    """
    expect_kind(Optimizer, sparse=sparse, outer=outer)
    expect_counts(outer_every=outer_every)
    expect_aggregate(aggregate)
    f = _SpartaDiLoCo(sparse, outer, Fragments(outer_every), aggregate)
    return sparse._replace(
        init=f.init, send=f.send, receive=f.receive, compare=f.compare, areas=f.areas
    )


@dataclass(frozen=True)
class _SpartaDiLoCo:
    """The functions of `sparta_diloco`."""

    sparse: Optimizer
    outer: Optimizer
    fragments: Fragments
    aggregate: AggregateFn

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        own, _ = self.sparse.init(params)
        # a copy: whoever steps may donate the state and keep the params
        anchor = jax.tree.map(lambda theta: jnp.array(theta, jnp.float32, copy=True), params)
        return own, OuterState(anchor, self.fragments.init_of_each(self.outer, params)[1])

    def send(self, own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        number = self.fragments.in_round(step)
        places, after = self.sparse.send(own, params, shared, step)
        message = TwoParts(places, self._pseudogradient(own, number))
        return message, self._after_sending(after, number)

    def receive(
        self, messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        number = self.fragments.in_round(step)
        here = self.fragments.take(params, number)
        anchor = self.fragments.take(shared.anchor, number)
        agreed = self.aggregate(messages.fragment, peers.weight)
        pseudogradient = jax.tree.map(lambda a, x, d: (a - x + d)[None], anchor, here, agreed)
        one = RoundPeers.synchronous(jnp.ones(1, jnp.int32))
        state = row(shared.outer, number)
        moves, state = self.outer.receive(pseudogradient, one, anchor, state, step)
        anchor = jax.tree.map(jnp.add, anchor, moves)

        updates, _ = self.sparse.receive(messages.places, peers, params, shared, step)
        moved = jax.tree.map(jnp.subtract, anchor, here)
        updates = self.fragments.put(updates, moved, number)
        anchors = self.fragments.put(shared.anchor, anchor, number)
        return updates, OuterState(anchors, put_row(shared.outer, state, number))

    def compare(
        self, own: Tree, message: Tree, params: Tree, step: jax.Array
    ) -> tuple[jax.Array, Tree]:
        number = self.fragments.in_round(step)
        mine = self._pseudogradient(own, number)
        off = optax.tree.norm(jax.tree.map(jnp.subtract, message.fragment, mine))
        distance, after = self.sparse.compare(own, message.places, params, step)
        distance = jnp.maximum(distance, off / (optax.tree.norm(mine) + SMALLEST_NORMAL))
        return distance, self._after_sending(after, number)

    def areas(self, params: Tree) -> Tree:
        return TwoParts(*[self.sparse.areas(params)] * 2)

    def _pseudogradient(self, own: Tree, number: jax.Array) -> Tree:
        """Return (theta - theta_p)[f]."""
        return jax.tree.map(jnp.negative, self.fragments.take(own.drift, number))

    def _after_sending(self, own: Tree, number: jax.Array) -> Tree:
        still = jax.tree.map(jnp.zeros_like, self.fragments.take(own.drift, number))
        return own._replace(drift=self.fragments.put(own.drift, still, number))
