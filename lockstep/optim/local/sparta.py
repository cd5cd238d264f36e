"""SPARTA: peers train alone, and in each round average a few of their params."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lockstep.optim.aggregation.aggregate import AggregateFn, mean
from lockstep.optim.expect import expect_aggregate, expect_integer, expect_number, expect_one_of
from lockstep.optim.local.fedavg import fedavg
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree, norm_ratio

SELECTORS = ("random", "shuffled", "partitioned")


def sparta(
    inner: Optimizer,
    *,
    inner_steps: int,
    share: float,
    seed: int,
    selector: str = "random",
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return sparse parameter averaging: peers average a random share of the params.

    With theta_p the local params of peer p, in each round:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        theta[S]   <- mean over peers of theta_p[S]
        theta_p[S] <- theta[S]

    S is the same for all peers: each parameter is cut into round(share * size) parts, as even as
    possible, and S has one element of each. The selector chooses it: "random" draws it anew in
    each round; "shuffled" draws the first and then takes the next in turn, so that each element
    has its turn once in about 1 / share rounds; "partitioned" does so too, but draws the first
    anew in each such cycle. Every peer can compute S, so positions are not sent; a message is
    (theta - theta_p)[S] in float32.

    theta, the agreed params, is what peers last agreed on, element by element: 1 / share rounds
    ago on average. Peers that join later begin with it.

    In EXO Gym a random S has any elements, and the other two cut a random permutation of all.

    Args:
      inner: Takes the local steps.
      inner_steps: Local steps of a round; SPARTA's 1.
      share: Share of a parameter's elements in S, above 0 and at most 1; SPARTA's 0.0005 to 0.005.
      seed: Seed of the random S.
      selector: "random", "shuffled" or "partitioned".
      aggregate: Takes the place of the mean.

    References:
      Baioumy, Cheema, SPARTA: Distributed Training with Sparse Parameter Averaging,
        https://openreview.net/forum?id=stFPf3gzq1
    """
    expect_number("share", share, lambda x: 0 < x <= 1, "a number above 0, at most 1")
    expect_integer("seed", seed, lambda x: 0 <= x < 2**32, "an integer from 0, below 2**32")
    expect_one_of("selector", selector, SELECTORS)
    expect_aggregate(aggregate)
    places = _Places(share, seed, selector)
    whole = fedavg(inner, inner_steps=inner_steps)

    def message_of(own: Tree, at: Tree) -> Tree:
        return jax.tree.map(lambda d, at_K: -d.ravel()[at_K], own.drift, at)

    def after_sending(own: Tree, at: Tree) -> Tree:
        left = jax.tree.map(
            lambda d, at_K: d.ravel().at[at_K].set(0.0).reshape(d.shape), own.drift, at
        )
        return own._replace(drift=left)

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        at = places(params, step)
        return message_of(own, at), after_sending(own, at)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        def update(theta: jax.Array, agreed_K: jax.Array, at_K: jax.Array) -> jax.Array:
            return jnp.zeros(theta.size).at[at_K].set(-agreed_K).reshape(theta.shape)

        agreed = aggregate(messages, peers.weight)
        return jax.tree.map(update, params, agreed, places(params, step)), shared

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        at = places(params, step)
        mine = message_of(own, at)
        off = jax.tree.map(jnp.subtract, message, mine)
        return norm_ratio(off, mine), after_sending(own, at)

    return whole._replace(send=send, receive=receive, compare=compare, merge=None)


@dataclass(frozen=True)
class _Places:
    """The choice of S, from the settings of `sparta`."""

    share: float
    seed: int
    selector: str

    def __call__(self, params: Tree, step: jax.Array) -> Tree:
        """Return S: int32 [K] of each parameter, ascending."""
        leaves, structure = jax.tree.flatten(params)
        return jax.tree.unflatten(
            structure, [self._draw(n, leaf.size, step) for n, leaf in enumerate(leaves)]
        )

    def _draw(self, number: int, size: int, step: jax.Array) -> jax.Array:
        """Return a place in each of round(share * size) parts: int32 [K], ascending."""
        count = min(size, max(1, round(self.share * size)))
        width, longer = divmod(size, max(1, count))
        part_K = jnp.arange(count)
        width_K = width + (part_K < longer)  # the first parts have one more
        first_K = part_K * width + jnp.minimum(part_K, longer)

        def drawn(turn: jax.Array | int) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), turn)
            return jax.random.randint(jax.random.fold_in(key, number), (count,), 0, width_K)

        if self.selector == "random":
            return first_K + drawn(step)
        done = step - 1
        if self.selector == "shuffled":
            begin_K = drawn(0)
        else:
            begin_K = jnp.where(part_K < longer, drawn(done // (width + 1)), drawn(done // width))
        return first_K + (begin_K + done) % width_K
