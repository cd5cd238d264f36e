"""Streaming DiLoCo: a fragment of the params at a time, which arrives while peers train on."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pipeline.optim.expect import expect_counts, expect_decay, expect_integer
from pipeline.optim.local.diloco import outer_sgd
from pipeline.optim.local.fragments import fragment_of, init_of_each, put, put_row, row, take
from pipeline.optim.local.local_steps import check_parts, step_alone
from pipeline.optim.optimizer import Optimizer, RoundPeers, Tree
from pipeline.optim.quantize.quantizer import Quantizer


class StreamingState(NamedTuple):
    """What each peer owns in `streaming_diloco`.

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


def streaming_diloco(  # noqa: PLR0913 - DiLoCo's settings and its own
    inner: Optimizer,
    *,
    inner_steps: int,
    fragments: int,
    delay: int,
    mixing: float,
    outer_learning_rate: float,
    outer_momentum: float,
    nesterov: bool,
    quantizer: Quantizer | None = None,
    error_feedback: float = 0.0,
) -> Optimizer:
    """Return Streaming DiLoCo: DiLoCo of a fragment in each round, taken up some local steps later.

    With the names of `diloco`, H = inner_steps, F = fragments and f = (t - 1) mod F, in round t:

        H / F times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        D       = mean over peers of (theta - theta_p)[f]
        m[f]   <- outer_momentum * m[f] + D
        theta[f]  <- theta[f] - outer_learning_rate * (D + outer_momentum * m[f])

    and `delay` local steps into round t + 1, before the next one:

        theta_p[f] <- mixing * theta_p[f] + (1 - mixing) * theta[f]

    So each fragment is exchanged every H local steps, and peers train on without waiting for it. A
    peer that takes no step in a round takes up the fragment too. A message is 4 / F bytes per
    parameter, fewer with a quantizer. theta, the params of all, is what they last agreed on,
    fragment by fragment. If a message is lost, so are its peer's local steps in that fragment.

    Fragment f is the f-th of F equal ranges of each parameter: where layers are stacked, a block of
    layers as in the paper; of the embedding and the head, which there are in a fragment of their
    own, a block of rows. So all messages are alike. With one fragment, no delay and no mixing it is
    DiLoCo.

    Args:
      inner: Takes the local steps.
      inner_steps: Local steps between two exchanges of a fragment, a multiple of F; the paper's H.
      fragments: In how many fragments the params are exchanged.
      delay: Local steps of a peer until what was exchanged arrives, below H / F; the paper's tau.
      mixing: Share of its own params that a peer keeps then, in [0, 1); the paper's alpha.
      outer_learning_rate: Of the step of a fragment, constant.
      outer_momentum: Decay of m per exchange of its fragment, in [0, 1).
      nesterov: Whether the momentum is Nesterov's, as above; without it, the step is m[f].
      quantizer: Rounds what is sent, as of `quantized`; None sends float32.
      error_feedback: As of `quantized`, of each fragment by itself.

    References:
      Douillard et al., Streaming DiLoCo with overlapping communication,
        https://arxiv.org/abs/2501.18512
    """
    expect_counts(inner_steps=inner_steps, fragments=fragments)
    steps, left = divmod(inner_steps, fragments)
    expect_integer("inner_steps", inner_steps, lambda _: not left, f"a multiple of {fragments}")
    expect_integer("delay", delay, lambda x: 0 <= x < steps, f"an integer from 0, below {steps}")
    expect_decay("mixing", mixing)
    outer = outer_sgd(outer_learning_rate, outer_momentum, nesterov, quantizer, error_feedback)
    check_parts(inner, outer)
    take_one, put_one = partial(take, fragments=fragments), partial(put, fragments=fragments)

    def init(params: Tree) -> tuple[Tree, Tree]:
        # a copy: whoever steps may donate the state and keep the params
        local = jax.tree.map(lambda theta: jnp.array(theta, jnp.float32, copy=True), params)
        own, shared = init_of_each(outer, params, fragments)
        return StreamingState(local, *inner.init(params), own), shared

    def align(own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        mixed = jax.tree.map(
            lambda x, theta: mixing * x + (1 - mixing) * theta,
            take_one(own.local, fragment),
            take_one(params, fragment),
        )
        return own._replace(local=put_one(own.local, mixed, fragment))

    def lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        del shared, step
        return jax.tree.map(lambda x, theta: x.astype(theta.dtype), own.local, params)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        del params
        states = own.inner_own, own.inner_shared
        updates, inner_own, inner_shared = step_alone(inner, grads, *states, own.local, step)
        local = jax.tree.map(jnp.add, own.local, updates)
        return StreamingState(local, inner_own, inner_shared, own.outer)

    def arrive(own: StreamingState, params: Tree, step: jax.Array) -> Tree:
        """Return the outer optimizer's state of the fragment after it took the pseudogradient."""
        number = fragment_of(step, fragments)
        here = take_one(params, number)
        pseudogradient = jax.tree.map(jnp.subtract, here, take_one(own.local, number))
        return outer.accumulate(pseudogradient, row(own.outer, number), here, step)

    def after_sending(own: StreamingState, state: Tree, step: jax.Array) -> StreamingState:
        number = fragment_of(step, fragments)
        return own._replace(outer=put_row(own.outer, state, number))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        number = fragment_of(step, fragments)
        here, agreed = take_one(params, number), row(shared, number)
        message, state = outer.send(arrive(own, params, step), here, agreed, step)
        return message, after_sending(own, state, step)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        number = fragment_of(step, fragments)
        here, agreed = take_one(params, number), row(shared, number)
        updates, agreed = outer.receive(messages, peers, here, agreed, step)
        still = jax.tree.map(jnp.zeros_like, params)
        return put_one(still, updates, number), put_row(shared, agreed, number)

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        here = take_one(params, fragment_of(step, fragments))
        distance, state = outer.compare(arrive(own, params, step), message, here, step)
        return distance, after_sending(own, state, step)

    def areas(params: Tree) -> Tree:
        return outer.areas(jax.eval_shape(take_one, params, jnp.zeros((), jnp.int32)))

    return Optimizer(
        init, lookahead, accumulate, send, receive, compare, areas, steps, align, fragments, delay
    )
