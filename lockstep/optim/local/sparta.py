"""SPARTA: peers train alone, and in each round average a few of their params."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim import expect
from lockstep.optim.aggregation import AggregateFn, mean
from lockstep.optim.local.local_steps import fedavg
from lockstep.optim.local.streaming import Fragments, put_row, row
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree

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

    theta, the agreed params, is what peers last agreed on, element by element: on average 1 / share
    rounds ago with "random", and about half of that with the others. Peers that join later begin
    with it.

    In EXO Gym a random S has any elements, and the other two cut a random permutation of all.

    SPARTA's inner_steps are 1, its share 0.0005 to 0.005.

    References:
      Baioumy, Cheema, SPARTA: Distributed Training with Sparse Parameter Averaging,
        https://openreview.net/forum?id=stFPf3gzq1
    """
    expect.number("share", share, lambda x: 0 < x <= 1, "a number above 0, at most 1")
    expect.integer("seed", seed, lambda x: 0 <= x < 2**32, "an integer from 0, below 2**32")
    expect.one_of("selector", selector, SELECTORS)
    expect.aggregate(aggregate)
    places = _choice(share, seed, selector)
    base = fedavg(inner, inner_steps=inner_steps)

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        at = places(params, step)
        message = jax.tree.map(lambda d, at_K: -d.ravel()[at_K], own.drift, at)
        drift = jax.tree.map(
            lambda d, at_K: d.ravel().at[at_K].set(0.0, unique_indices=True).reshape(d.shape),
            own.drift,
            at,
        )
        return message, own._replace(drift=drift)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        def update(theta: jax.Array, agreed_K: jax.Array, at_K: jax.Array) -> jax.Array:
            flat = jnp.zeros(theta.size).at[at_K].set(-agreed_K, unique_indices=True)
            return flat.reshape(theta.shape)

        agreed = aggregate(messages, peers.weight)
        return jax.tree.map(update, params, agreed, places(params, step)), shared

    return base._replace(send=send, receive=receive, merge=None)


def _choice(share: float, seed: int, selector: str) -> Callable[[Tree, jax.Array], Tree]:
    """Return SPARTA's chosen elements: (params, step) -> S, int32 [K] a parameter, ascending."""

    def choose(params: Tree, step: jax.Array) -> Tree:
        leaves, structure = jax.tree.flatten(params)
        places = [draw(number, leaf.size, step) for number, leaf in enumerate(leaves)]
        return jax.tree.unflatten(structure, places)

    def draw(number: int, size: int, step: jax.Array) -> jax.Array:
        """Return a place, of SPARTA's chosen ones, in each of round(share * size) parts."""
        count = min(size, max(1, round(share * size)))
        width, longer = divmod(size, max(1, count))
        part_K = jnp.arange(count)
        width_K = width + (part_K < longer)  # the first parts have one more
        first_K = part_K * width + jnp.minimum(part_K, longer)

        def drawn(turn: jax.Array | int) -> jax.Array:
            # Named, since JAX's default generator is a setting: all peers have to draw the same.
            key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), turn)
            return jax.random.randint(jax.random.fold_in(key, number), (count,), 0, width_K)

        if selector == "random":
            return first_K + drawn(step)
        done = step - 1
        if selector == "shuffled":
            begin_K = drawn(0)
        else:
            begin_K = jnp.where(part_K < longer, drawn(done // (width + 1)), drawn(done // width))
        return first_K + (begin_K + done) % width_K

    return choose


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

    `sparse` is made by `sparta`. The outer optimizer, such as `sgd` with momentum, gets D as if
    from one peer. `aggregate` takes the place of the mean in D; that of theta[S] is an argument of
    `sparta`.

    References:
      Baioumy, Cheema, SPARTA: Distributed Training with Sparse Parameter Averaging,
        https://openreview.net/forum?id=stFPf3gzq1
    """
    expect.kind(Optimizer, sparse=sparse, outer=outer)
    expect.counts(outer_every=outer_every)
    expect.aggregate(aggregate)
    cut = Fragments(outer_every)

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, _ = sparse.init(params)
        # a copy: a training step may donate the state and keep the params
        anchor = jax.tree.map(lambda theta: jnp.array(theta, jnp.float32, copy=True), params)
        return own, OuterState(anchor, cut.init_of_each(outer, params)[1])

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        number = cut.in_round(step)
        places, after = sparse.send(own, params, shared, step)
        pseudogradient = jax.tree.map(jnp.negative, cut.take(own.drift, number))
        zeros = jax.tree.map(jnp.zeros_like, cut.take(after.drift, number))
        after = after._replace(drift=cut.put(after.drift, zeros, number))
        return TwoParts(places, pseudogradient), after

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        number = cut.in_round(step)
        part, anchor = cut.take(params, number), cut.take(shared.anchor, number)
        agreed = aggregate(messages.fragment, peers.weight)
        pseudogradient = jax.tree.map(lambda a, x, d: (a - x + d)[None], anchor, part, agreed)
        lone = RoundPeers.synchronous(jnp.ones(1, jnp.int32))
        state = row(shared.outer, number)
        moves, state = outer.receive(pseudogradient, lone, anchor, state, step)
        anchor = jax.tree.map(jnp.add, anchor, moves)

        updates, _ = sparse.receive(messages.places, peers, params, shared, step)
        moved = jax.tree.map(jnp.subtract, anchor, part)
        updates = cut.put(updates, moved, number)
        anchors = cut.put(shared.anchor, anchor, number)
        return updates, OuterState(anchors, put_row(shared.outer, state, number))

    def areas(params: Tree) -> Tree:
        return TwoParts(*[sparse.areas(params)] * 2)

    return sparse._replace(init=init, send=send, receive=receive, areas=areas)
