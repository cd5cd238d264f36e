"""The two jitted programs that are the whole of a round: `peer_step` and `receive`.

A trainer and a witness call the very same programs on the same shapes, so that a witness gets the
same bits. Shapes in names: M micro-batches, B sequences of one, T tokens of one, P peers.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

import models
from pipeline import config, schedules
from pipeline.errors import LockstepError
from pipeline.loss import cross_entropy, weighted_cross_entropy
from pipeline.optim.balance import balanced, leave
from pipeline.optim.build import build
from pipeline.optim.optimizer import Optimizer, Tree
from pipeline.placement import keep_cut


class PeerResult(NamedTuple):
    """What a peer leaves of a round: its state, its message and its loss before the round."""

    own: Tree
    message: Tree
    loss: jax.Array


class Programs:
    """A run's jitted programs.

    Args:
      run: the whole run.
      hf_config: the model's `config.json`.
      first_step: rounds trained by the run that this one extends, 0 for a new run.
    """

    def __init__(self, run: config.Run, hf_config: dict, first_step: int = 0):
        self.model = models.get(hf_config["model_type"])
        model_config = self.model.Config.from_hf(hf_config)
        learning_rate = schedules.make(run.llm.lr_schedule)
        if first_step:  # what Psyche calls a cold start: the first epoch after a pause
            warmup_steps = run.llm.cold_start_warmup_steps
            learning_rate = schedules.cold_start(learning_rate, first_step + 1, warmup_steps)
        groups = {name.split("/")[0] for name in self.model.NAMES}
        optimizer = build(
            run.llm.optimizer, learning_rate, run.peers.overlap, self.model.STACKED, groups
        )
        self.optimizer = self._balance(optimizer, model_config, run.peers.balance_speed)
        self.parts = run.peers.fsdp
        self.keep_cut = partial(keep_cut, parts=self.parts)
        self.head = partial(self.model.head, model_config)
        self.features: Callable[[Tree, jax.Array], jax.Array] = partial(
            self.model.features,
            model_config,
            scan=run.peers.scan_layers,
            dtype=jnp.dtype(run.peers.precision),
            attention=run.peers.attention,
            remat=run.peers.remat,
        )

    def _balance(self, optimizer: Optimizer, model_config: Any, speed: float) -> Optimizer:
        """Keeps the optimizer from params whose gradient is the load of experts."""
        paths: list[str] = []
        if named := getattr(self.model, "BALANCE", ()):  # a model may have no layer with experts
            shapes = jax.eval_shape(partial(self.model.init, model_config, 0))
            paths = [path for path in flatten_dict(shapes, sep="/") if path in named]
        if not paths and speed:
            raise LockstepError(
                f"[peers] balance_speed = {speed}, expected 0: no router of this model has a "
                "correction"
            )
        if paths:
            optimizer = leave(optimizer, paths)
        return balanced(optimizer, paths, speed) if speed else optimizer

    @cached_property
    def init(self) -> Callable[[Tree], tuple[Tree, Tree]]:
        """init(params) -> own, shared."""
        return jax.jit(lambda params: self.keep_cut(self.optimizer.init(params)))

    @cached_property
    def peer_step(self) -> Callable[..., PeerResult]:
        """peer_step(params, own, shared, tokens_MBT, count, step) -> PeerResult; donates `own`."""
        return jax.jit(self.step_of_a_peer, donate_argnums=1)

    @cached_property
    def gradient(self) -> Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]:
        """gradient(params, tokens_MBT, count) -> loss, gradient; for benchmarks."""
        return jax.jit(self._gradient)

    @cached_property
    def receive(self) -> Callable[[Tree, jax.Array, Tree, Tree, jax.Array], tuple[Tree, Tree]]:
        """receive(messages, present_P, params, shared, step) -> params, shared."""
        return jax.jit(self._receive)

    @cached_property
    def compare(self) -> Callable[..., tuple[jax.Array, Tree]]:
        """compare(params, own, shared, tokens_MBT, count, step, message) -> distance, own.

        For an audit on other hardware: how far the sent message lies from the replayed one, and the
        peer's state after having sent it (`Optimizer.compare`).
        """
        return jax.jit(self._compare)

    @cached_property
    def measure(self) -> Callable[[Tree, jax.Array], jax.Array]:
        """measure(params, tokens_BT) -> each sequence's cross-entropy, [B]."""
        return jax.jit(
            lambda params, tokens: cross_entropy(
                self.features(params, tokens), self.head(params), tokens
            )
        )

    def step_of_a_peer(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        tokens_MBT: jax.Array,
        count: jax.Array,
        step: jax.Array,
    ) -> PeerResult:
        """Gradient on `count` sequences, the optimizer's inner step, and the message.

        Args:
          params: what all peers agree on.
          own: the peer's part of the optimizer's state.
          shared: the part that is one copy.
          tokens_MBT: int32; sequences after the first `count` are padding.
          count: int32; how many sequences this peer was assigned.
          step: int32, from 1.
        """
        own, loss = self._inner(params, own, shared, tokens_MBT, count, step)
        message, own = self.optimizer.send(own, params, shared, step)
        return PeerResult(self.keep_cut(own), message, loss)

    def _inner(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        tokens_MBT: jax.Array,
        count: jax.Array,
        step: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        there = self.optimizer.look(params, own, shared, step)
        loss, grads = self._gradient(there, tokens_MBT, count)
        return self.optimizer.inner(grads, own, params, step), loss

    def _gradient(
        self, params: Tree, tokens_MBT: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Mean loss and gradient over the first `count` sequences.

        The number of micro-batches is counted while running, so that a batch ramp or an uneven
        assignment compiles nothing anew; where no peer is ever assigned more than one, there is no
        loop.
        """
        size = tokens_MBT.shape[1]

        def loss(params: Tree, tokens_BT: jax.Array, weight_B: jax.Array) -> jax.Array:
            x_ND = self.features(params, tokens_BT)
            return weighted_cross_entropy(x_ND, self.head(params), tokens_BT, weight_B)

        def of_one(micro: jax.Array | int) -> tuple[jax.Array, Tree]:
            # the mean's weights, so that nothing is left to divide: a pass over all gradients less
            weight_B = jnp.where(micro * size + jnp.arange(size) < count, 1 / count, 0.0)
            tokens_BT = jax.lax.dynamic_index_in_dim(tokens_MBT, micro, keepdims=False)
            return jax.value_and_grad(loss)(params, tokens_BT, weight_B)

        def add(micro: jax.Array, sums: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            return jax.tree.map(jnp.add, sums, of_one(micro))

        if tokens_MBT.shape[0] == 1:  # no sums: two passes over all gradients less
            value, grads = of_one(0)
        else:
            zero = (jnp.zeros(()), self.keep_cut(jax.tree.map(jnp.zeros_like, params)))
            value, grads = jax.lax.fori_loop(0, (count + size - 1) // size, add, zero)
        return value, self.keep_cut(grads)

    def _receive(
        self, messages: Tree, present_P: jax.Array, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        updates, shared = self.optimizer.receive(messages, present_P, params, shared, step)
        params = optax.apply_updates(params, updates)
        return self.keep_cut(params), self.keep_cut(shared)

    def _compare(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        tokens_MBT: jax.Array,
        count: jax.Array,
        step: jax.Array,
        message: Tree,
    ) -> tuple[jax.Array, Tree]:
        own, _ = self._inner(params, own, shared, tokens_MBT, count, step)
        return self.optimizer.compare(own, message)


def micro_batches(tokens_NT: np.ndarray, capacity: int, size: int) -> np.ndarray:
    """Sequences cut into micro-batches of one shape, padded with zeros: [M, B, T].

    Args:
      tokens_NT: int32, the sequences assigned to a peer.
      capacity: the largest number of sequences any peer is assigned in this run.
      size: B, sequences of a micro-batch.
    """
    count, length = tokens_NT.shape
    micro = -(-capacity // size)
    padded = np.zeros((micro * size, length), np.int32)
    padded[:count] = tokens_NT
    return padded.reshape(micro, size, length)
