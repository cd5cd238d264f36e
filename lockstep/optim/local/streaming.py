"""Streaming DiLoCo: a fragment of the params at a time, which arrives while peers train on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim.expect import expect_counts, expect_decay, expect_integer
from lockstep.optim.local.fragments import Fragments, put_row, row
from lockstep.optim.local.local_steps import check_parts, step_alone
from lockstep.optim.optimizer import Merge, Optimizer, RoundPeers, Tree


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

    Args:
      inner: Takes the local steps.
      outer: Takes the step of a fragment, as in `diloco`; each fragment has a state by itself.
      inner_steps: Local steps between two exchanges of a fragment, a multiple of F; the paper's H.
      fragments: Number of fragments of the params.
      delay: Local steps into the next round after which a peer adopts the exchanged fragment, fewer
        than H / F; the paper's tau.
      mixing: Share of its own params that a peer keeps then, in [0, 1); the paper's alpha.

    References:
      Douillard et al., Streaming DiLoCo with overlapping communication,
        https://arxiv.org/abs/2501.18512
    """
    expect_counts(inner_steps=inner_steps, fragments=fragments)
    steps, left = divmod(inner_steps, fragments)
    expect_integer("inner_steps", inner_steps, lambda _: not left, f"a multiple of {fragments}")
    expect_integer("delay", delay, lambda x: 0 <= x < steps, f"an integer from 0, below {steps}")
    expect_decay("mixing", mixing)
    check_parts(inner, outer)
    f = _Streaming(inner, outer, Fragments(fragments), mixing)
    return Optimizer(
        f.init, f.lookahead, f.accumulate, f.send, f.receive, f.compare, f.areas,
        steps, f.align, fragments, delay, f.merge,
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
        here, agreed = self.fragments.take(params, number), row(shared, number)
        message, state = self.outer.send(self._arrive(own, params, step), here, agreed, step)
        return message, self._after_sending(own, state, step)

    def receive(
        self, messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        def take(here: Tree, agreed: Tree) -> tuple[Tree, Tree]:
            return self.outer.receive(messages, peers, here, agreed, step)

        return self._step_fragment(take, params, shared, step)

    @property
    def merge(self) -> Merge | None:
        if self.outer.merge is None:
            return None
        aggregate, take_outer = self.outer.merge

        def take(merged: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
            def take_fragment(here: Tree, agreed: Tree) -> tuple[Tree, Tree]:
                return take_outer(merged, here, agreed, step)

            return self._step_fragment(take_fragment, params, shared, step)

        return Merge(aggregate, take)

    def compare(
        self, own: Tree, message: Tree, params: Tree, step: jax.Array
    ) -> tuple[jax.Array, Tree]:
        here = self.fragments.take(params, self.fragments.in_round(step))
        distance, state = self.outer.compare(self._arrive(own, params, step), message, here, step)
        return distance, self._after_sending(own, state, step)

    def areas(self, params: Tree) -> Tree:
        return self.outer.areas(
            jax.eval_shape(self.fragments.take, params, jnp.zeros((), jnp.int32))
        )

    def _step_fragment(
        self, take: Callable[[Tree, Tree], tuple[Tree, Tree]], params: Tree, shared: Tree,
        step: jax.Array,
    ) -> tuple[Tree, Tree]:  # fmt: skip
        """Return the updates and states of all, of which `take` changes those of a fragment."""
        number = self.fragments.in_round(step)
        updates, agreed = take(self.fragments.take(params, number), row(shared, number))
        still = jax.tree.map(jnp.zeros_like, params)
        return self.fragments.put(still, updates, number), put_row(shared, agreed, number)

    def _arrive(self, own: StreamingState, params: Tree, step: jax.Array) -> Tree:
        """Return the outer optimizer's state of the fragment after it took the pseudogradient."""
        number = self.fragments.in_round(step)
        here = self.fragments.take(params, number)
        pseudogradient = jax.tree.map(jnp.subtract, here, self.fragments.take(own.local, number))
        return self.outer.accumulate(pseudogradient, row(own.outer, number), here, step)

    def _after_sending(self, own: StreamingState, state: Tree, step: jax.Array) -> StreamingState:
        number = self.fragments.in_round(step)
        return own._replace(outer=put_row(own.outer, state, number))
