"""Decoupled DiLoCo: peers train on while a round closes, whoever is late in it."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim.expect import expect_decay, expect_one_of
from lockstep.optim.local.fragments import Fragments
from lockstep.optim.local.streaming import streaming_diloco
from lockstep.optim.optimizer import Optimizer, Tree, inside

ADOPT = ("overwrite", "blend", "carry")


class CarriedState(NamedTuple):
    """A peer's own state in `decoupled_diloco` with adopt = "carry".

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

    Args:
      inner: Takes the local steps.
      outer: Takes the step of a fragment: `outer_sgd`, `delayed_nesterov`, `cgad` or `heloco`.
      inner_steps: Local steps of the fastest peer between two exchanges of a fragment, a multiple
        of F.
      fragments: Number of fragments of the params, F.
      delay: As in `streaming_diloco`.
      adopt: How a peer adopts a fragment: overwrite, blend or carry.
      mixing: Of blend: the share of its own params that a peer keeps, in [0, 1).

    References:
      Douillard et al., Decoupled DiLoCo, https://arxiv.org/abs/2604.21428
    """
    expect_one_of("adopt", adopt, ADOPT)
    expect_decay("mixing", mixing)
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
    f = _Carrying(streaming, Fragments(fragments))
    return inside(streaming)._replace(init=f.init, align=f.align, send=f.send, compare=f.compare)


@dataclass(frozen=True)
class _Carrying:
    """The functions of `decoupled_diloco` that "carry" changes."""

    streaming: Optimizer
    fragments: Fragments

    def init(self, params: Tree) -> tuple[Tree, Tree]:
        own, shared = self.streaming.init(params)
        return CarriedState(own, jax.tree.map(jnp.copy, own.local)), shared

    def align(self, own: Tree, params: Tree, fragment: jax.Array) -> Tree:
        here = self.fragments.take(params, fragment)
        local, taken = own.optimizer.local, self.fragments.take(own.taken, fragment)
        # Steps taken since the fragment was sent are in no message yet, so they are added to the
        # agreed params; overwriting would lose them.
        carried = jax.tree.map(
            lambda theta, x, t: theta + (x - t), here, self.fragments.take(local, fragment), taken
        )
        local = self.fragments.put(local, carried, fragment)
        return CarriedState(
            own.optimizer._replace(local=local), self.fragments.put(own.taken, here, fragment)
        )

    def send(self, own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        message, after = self.streaming.send(own.optimizer, params, shared, step)
        return message, self._after_sending(own, after, step)

    def compare(
        self, own: Tree, message: Tree, params: Tree, step: jax.Array
    ) -> tuple[jax.Array, Tree]:
        distance, after = self.streaming.compare(own.optimizer, message, params, step)
        return distance, self._after_sending(own, after, step)

    def _after_sending(self, own: CarriedState, after: Tree, step: jax.Array) -> CarriedState:
        number = self.fragments.in_round(step)
        sent = self.fragments.take(after.local, number)
        return CarriedState(after, self.fragments.put(own.taken, sent, number))
