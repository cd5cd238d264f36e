"""Local steps: a peer trains by itself for a while, and then sends its pseudogradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from lockstep.optim import expect
from lockstep.optim.aggregation import AggregateFn, mean
from lockstep.optim.dense import sgd
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree


class LocalState(NamedTuple):
    """A peer's own state in the optimizer `local_steps`.

    Attributes:
      drift: Its local params minus the params of all; shapes of the params, float32.
      inner_own: `own` of the inner optimizer.
      inner_shared: `shared` of the inner optimizer, which here is the peer's alone.
      outer: `own` of the outer optimizer.
    """

    drift: Tree
    inner_own: Tree
    inner_shared: Tree
    outer: Tree


def local_steps(inner: Optimizer, outer: Optimizer, inner_steps: int) -> Optimizer:
    """Return the outer optimizer, on the pseudogradients that steps of the inner one make.

    With theta the params of all, and theta_p the local params of peer p, which are theta when a
    round begins:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        then                 theta   <- the outer optimizer's step from theta, on the
                                        pseudogradients theta - theta_p in place of gradients

    The inner optimizer's state stays with its peer from round to round. The outer
    optimizer decides what peers send, and what messages do to theta. If a message is lost, so are
    its local steps.

    Where peers' data differ, an inner SGD lets theta rest at the mean of the params that peers pull
    to. An inner Adam normalizes each peer's gradients; where these have little noise, its steps are
    signs, and theta rests at the median.
    """
    expect.counts(inner_steps=inner_steps)
    check_parts(inner, outer)

    def init(params: Tree) -> tuple[Tree, Tree]:
        # The drift, not the local params: it is zero at the start of each round, so a peer that
        # misses a round is at the agreed params without doing anything.
        drift = jax.tree.map(lambda theta: jnp.zeros(theta.shape, jnp.float32), params)
        own, shared = outer.init(params)
        return LocalState(drift, *inner.init(params), own), shared

    def local(params: Tree, own: LocalState) -> Tree:
        return jax.tree.map(lambda theta, d: (theta + d).astype(theta.dtype), params, own.drift)

    def lookahead(params: Tree, own: Tree, shared: Tree, step: jax.Array) -> Tree:
        return local(params, own)

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        local_params = local(params, own)
        states = own.inner_own, own.inner_shared
        updates, inner_own, inner_shared = step_alone(inner, grads, *states, local_params, step)
        drift = jax.tree.map(jnp.add, own.drift, updates)
        return LocalState(drift, inner_own, inner_shared, own.outer)

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        pseudogradient = jax.tree.map(jnp.negative, own.drift)
        arrived = outer.accumulate(pseudogradient, own.outer, params, step)
        message, state = outer.send(arrived, params, shared, step)
        # the peer goes back to the params of all
        return message, own._replace(drift=jax.tree.map(jnp.zeros_like, own.drift), outer=state)

    return Optimizer(
        init, accumulate, send, outer.receive, outer.areas, lookahead,
        inner_steps=inner_steps, merge=outer.merge,
    )  # fmt: skip


def check_parts(inner: Optimizer, outer: Optimizer) -> None:
    """Check that two optimizers can be the inner and the outer one of local steps.

    Raises:
      ValueError: One of them is no Optimizer, or looks ahead.
    """
    expect.kind(Optimizer, inner=inner, outer=outer)
    for name, optimizer in (("inner", inner), ("outer", outer)):
        if optimizer.looks_ahead:
            raise ValueError(
                f"{name} takes gradients elsewhere than at the params, expected an optimizer "
                "without overlap and local steps"
            )


def step_alone(
    optimizer: Optimizer, grads: Tree, own: Tree, shared: Tree, params: Tree, step: jax.Array
) -> tuple[Tree, Tree, Tree]:
    """Return an optimizer's updates and both of its states after a local step, of a lone peer."""
    own = optimizer.accumulate(grads, own, params, step)
    message, own = optimizer.send(own, params, shared, step)
    received = jax.tree.map(lambda leaf: leaf[None], message)
    lone = RoundPeers.synchronous(jnp.ones(1, jnp.int32))
    updates, shared = optimizer.receive(received, lone, params, shared, step)
    return updates, own, shared


def diloco(inner: Optimizer, outer: Optimizer, *, inner_steps: int) -> Optimizer:
    """Return DiLoCo: the mean pseudogradient of the peers is the gradient of SGD with momentum.

    With the names of `local_steps` and `outer_sgd`, in each round:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        D       = mean over peers of theta - theta_p
        m      <- momentum * m + D
        theta  <- theta - learning_rate * (D + momentum * m)        with Nesterov's
        theta  <- theta - learning_rate * m                         without

    A message is the pseudogradient theta - theta_p in float32, 4 bytes per parameter, or as a
    quantizer rounds it, from each peer, each round.

    The inner optimizer is AdamW in DiLoCo, Muon in MuLoCo; the outer one is `outer_sgd`, or that in
    `quantized`. DiLoCo's inner_steps are 500.

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
        https://arxiv.org/abs/2311.08105
      Therien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo,
        https://arxiv.org/abs/2505.23725
    """
    return local_steps(inner, outer, inner_steps)


def outer_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return SGD on the mean pseudogradient of local steps; peers count by assigned sequences.

    The learning rate is a schedule of the round, counted from 1, or a constant. DiLoCo has 0.7, and
    Nesterov's momentum of 0.9.
    """
    return sgd(learning_rate, momentum=momentum, nesterov=nesterov, aggregate=aggregate)


def fedavg(inner: Optimizer, *, inner_steps: int, aggregate: AggregateFn = mean) -> Optimizer:
    """Return federated averaging: the params become the mean of all peers' local ones.

    With the names of `local_steps`, in each round:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        theta  <- mean over peers of theta_p

    A message is theta - theta_p in float32: 4 bytes per parameter, from each peer, each round.
    Peers count by the sequences that they were assigned; absent ones do not. In the paper the inner
    optimizer is SGD without momentum.

    References:
      McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        https://arxiv.org/abs/1602.05629
    """
    return local_steps(inner, outer_sgd(1.0, aggregate=aggregate), inner_steps)
