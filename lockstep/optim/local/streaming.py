"""Streaming DiLoCo: a fragment of the params at a time, which arrives while peers train on.

Shapes: F fragments, N elements of a parameter in each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim import expect
from lockstep.optim.local.local_steps import check_parts, step_alone
from lockstep.optim.optimizer import Merge, Optimizer, RoundPeers, Tree, inside


class Fragments(NamedTuple):
    """Params cut into fragments, of which each round exchanges one.

    Attributes:
      total: F.
    """

    total: int

    def in_round(self, step: jax.Array) -> jax.Array:
        """Return the number of the fragment that round `step` exchanges, 0 in the first one."""
        return (step - 1) % self.total

    def take(self, tree: Tree, number: jax.Array) -> Tree:
        """Return a fragment of params that is streamed: [N] of each."""
        return row(jax.tree.map(self._cut, tree), number)

    def put(self, tree: Tree, part: Tree, number: jax.Array) -> Tree:
        """Return params with one streamed fragment replaced."""

        def replace_row(x: jax.Array, part_N: jax.Array) -> jax.Array:
            rows_FN = put_row(self._cut(x), part_N, number)
            flat: jax.Array = rows_FN.ravel()[: x.size]
            return flat.reshape(x.shape)

        return jax.tree.map(replace_row, tree, part)

    def init_of_each(self, optimizer: Optimizer, params: Tree) -> tuple[Tree, Tree]:
        """Return an optimizer's first states for each streamed fragment, with a leading axis F."""
        numbers = jnp.arange(self.total)
        return jax.vmap(lambda number: optimizer.init(self.take(params, number)))(numbers)

    def _cut(self, x: jax.Array) -> jax.Array:
        """Return params cut into fragments, [F, N], the last row padded with zeros."""
        # Rows of one width: all rounds run one program, and the number of a row can be traced.
        width = -(-x.size // self.total)
        return jnp.pad(x.ravel(), (0, self.total * width - x.size)).reshape(self.total, width)


def row(states: Tree, number: jax.Array) -> Tree:
    """Return a streamed fragment's state among those of all."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, keepdims=False), states)


def put_row(states: Tree, state: Tree, number: jax.Array) -> Tree:
    """Return the states of all streamed fragments with one replaced."""
    return jax.tree.map(
        lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, number, 0), states, state
    )


class StreamingState(NamedTuple):
    """A peer's own state in `streaming_diloco`.

    Attributes:
      local: Its local params; shapes of the params, float32.
      inner_own: `own` of the inner optimizer.
      inner_shared: `shared` of the inner optimizer, which here is the peer's alone.
      outer: `own` of the outer optimizer, of each fragment.
    """

    local: Tree
    inner_own: Tree
    inner_shared: Tree
    outer: Tree


def streaming_diloco(
    inner: Optimizer,
    outer: Optimizer,
    *,
    inner_steps: int,
    fragments: int,
    delay: int,
    mixing: float,
) -> Optimizer:
    """Return Streaming DiLoCo: each round exchanges one fragment, adopted some local steps later.

    With the names of `diloco`, H = inner_steps, F = fragments and f = (t - 1) mod F, in round t:

        H / F times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        D       = mean over peers of (theta - theta_p)[f]
        m[f]   <- momentum * m[f] + D
        theta[f]  <- theta[f] - learning_rate * (D + momentum * m[f])

    and `delay` local steps into round t + 1, before the next one:

        theta_p[f] <- mixing * theta_p[f] + (1 - mixing) * theta[f]

    So each fragment is exchanged every H local steps, and peers do not wait for it. A peer that
    takes no step in a round adopts the fragment too. A message is 4 / F bytes per parameter, fewer
    with a quantizer. theta, the agreed params, is what peers last agreed on, fragment by fragment.
    If a message is lost, so are its peer's local steps in that fragment.

    Fragment f is the f-th of F equal ranges of each parameter: a block of layers, as in the paper,
    where layers are stacked; a block of rows of the embedding and of the head, to which the paper
    gives a fragment of their own. So all messages are alike. With one fragment, no delay and no
    mixing it is DiLoCo.

    H is a multiple of F; `delay`, the paper's tau, is fewer than H / F; `mixing`, in [0, 1), is its
    alpha. Each fragment has a state of the outer optimizer by itself.

    References:
      Douillard et al., Streaming DiLoCo with overlapping communication,
        https://arxiv.org/abs/2501.18512
    """
    expect.counts(inner_steps=inner_steps, fragments=fragments)
    steps, left = divmod(inner_steps, fragments)
    expect.integer("inner_steps", inner_steps, lambda _: not left, f"a multiple of {fragments}")
    expect.integer("delay", delay, lambda x: 0 <= x < steps, f"an integer from 0, below {steps}")
    expect.decay("mixing", mixing)
    check_parts(inner, outer)
    f = _Streaming(inner, outer, Fragments(fragments), mixing)
    return Optimizer(
        f.init, f.accumulate, f.send, f.receive, f.areas, f.lookahead, f.align,
        steps, fragments, delay, f.merge,
    )  # fmt: skip


@dataclass(frozen=True)
class _Streaming:
    """The functions of `streaming_diloco`."""

    inner: Optimizer
    outer: Optimizer
    fragments: Fragments
    mixing: float

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        # A copy, because a training step donates the state's memory and keeps the params.
        local = jax.tree.map(lambda theta: jnp.array(theta, jnp.float32, copy=True), params)
        own, shared = self.fragments.init_of_each(self.outer, params)
        return StreamingState(local, *self.inner.init(params), own), shared

    def align(self, own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        mixed = jax.tree.map(
            lambda x, theta: self.mixing * x + (1 - self.mixing) * theta,
            self.fragments.take(own.local, fragment),
            self.fragments.take(params, fragment),
        )
        return own._replace(local=self.fragments.put(own.local, mixed, fragment))

    def lookahead(self, params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        return jax.tree.map(lambda x, theta: x.astype(theta.dtype), own.local, params)

    def accumulate(self, grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        states = own.inner_own, own.inner_shared
        updates, inner_own, inner_shared = step_alone(self.inner, grads, *states, own.local, step)
        local = jax.tree.map(jnp.add, own.local, updates)
        return StreamingState(local, inner_own, inner_shared, own.outer)

    def send(self, own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        number = self.fragments.in_round(step)
        part, agreed = self.fragments.take(params, number), row(shared, number)
        pseudogradient = jax.tree.map(jnp.subtract, part, self.fragments.take(own.local, number))
        arrived = self.outer.accumulate(pseudogradient, row(own.outer, number), part, step)
        message, state = self.outer.send(arrived, part, agreed, step)
        return message, own._replace(outer=put_row(own.outer, state, number))

    def receive(
        self, messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        return self._step_fragment(
            lambda part, agreed: self.outer.receive(messages, peers, part, agreed, step),
            params, shared, step,
        )  # fmt: skip

    @property
    def merge(self) -> Merge | None:
        if self.outer.merge is None:
            return None
        aggregate, take_outer = self.outer.merge

        def take(merged: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
            return self._step_fragment(
                lambda part, agreed: take_outer(merged, part, agreed, step), params, shared, step
            )

        return Merge(aggregate, take)

    def areas(self, params: Tree) -> Tree:
        return self.outer.areas(
            jax.eval_shape(self.fragments.take, params, jnp.zeros((), jnp.int32))
        )

    def _step_fragment(
        self, take: Callable[[Tree, Tree], tuple[Tree, Tree]], params: Tree, shared: Tree,
        step: jax.Array,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        """Return updates and states of all streamed fragments after `take` changed one."""
        number = self.fragments.in_round(step)
        updates, agreed = take(self.fragments.take(params, number), row(shared, number))
        zeros = jax.tree.map(jnp.zeros_like, params)
        return self.fragments.put(zeros, updates, number), put_row(shared, agreed, number)


ADOPT = ("overwrite", "blend", "carry")


class CarriedState(NamedTuple):
    """A peer's own state in streaming `decoupled_diloco` with adopt = "carry".

    Attributes:
      optimizer: `own` of Streaming DiLoCo.
      taken: Of its local params, what it has sent or adopted: the rest is its alone. Shapes of the
        params, float32.
    """

    optimizer: Tree
    taken: Tree


def decoupled_diloco(
    inner: Optimizer,
    outer: Optimizer,
    *,
    inner_steps: int,
    fragments: int,
    delay: int,
    adopt: str,
    mixing: float = 0.0,
) -> Optimizer:
    """Return Decoupled DiLoCo: Streaming DiLoCo whose messages may come late, with an age.

    With the names of `streaming_diloco`, a peer adopts fragment f, theta[f], by

        overwrite    theta_p[f] <- theta[f]
        blend        theta_p[f] <- mixing * theta_p[f] + (1 - mixing) * theta[f]
        carry        theta_p[f] <- theta[f] + (theta_p[f] - taken_p[f])

    where taken_p[f] is what of theta_p[f] the peer has sent or adopted: `carry` keeps the local
    steps that no message holds yet, those taken while a fragment travelled.

    Which messages a round waits for, and which it merges later, is not decided here: `receive` has
    their weights, ages and local steps. With all of age 0 it is Streaming DiLoCo, bit for bit.

    All local steps have the same number of tokens. So the paper's weight of a message, its tokens
    times its tokens per step, is in proportion to its tokens: the peers' weights in `receive`.

    The outer optimizer is `outer_sgd`, `delayed_nesterov`, `cgad` or `heloco`; `inner_steps` are
    those of the fastest peer; `mixing` is for blend alone.

    References:
      Douillard et al., Decoupled DiLoCo, https://arxiv.org/abs/2604.21428
    """
    expect.one_of("adopt", adopt, ADOPT)
    expect.decay("mixing", mixing)
    streaming = streaming_diloco(
        inner,
        outer,
        inner_steps=inner_steps,
        fragments=fragments,
        delay=delay,
        mixing=mixing if adopt == "blend" else 0.0,
    )
    if adopt != "carry":
        return streaming
    return _carrying(streaming, Fragments(fragments))


def _carrying(streaming: Optimizer, cut: Fragments) -> Optimizer:
    """Return Streaming DiLoCo whose peers carry the steps over that no message holds yet."""

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = streaming.init(params)
        return CarriedState(own, jax.tree.map(jnp.copy, own.local)), shared

    def align(own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        part = cut.take(params, fragment)
        local, taken = own.optimizer.local, cut.take(own.taken, fragment)
        # Steps taken since the fragment was sent are in no message yet, so they are added to the
        # agreed params; overwriting would lose them.
        carried = jax.tree.map(
            lambda theta, x, t: theta + (x - t), part, cut.take(local, fragment), taken
        )
        local = cut.put(local, carried, fragment)
        return CarriedState(own.optimizer._replace(local=local), cut.put(own.taken, part, fragment))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message, state = streaming.send(own.optimizer, params, shared, step)
        number = cut.in_round(step)
        taken = cut.put(own.taken, cut.take(state.local, number), number)
        return message, CarriedState(state, taken)

    return inside(streaming)._replace(init=init, align=align, send=send)
