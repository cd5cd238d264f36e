"""A run's jitted programs; `peer_step` and `receive` are the whole of a round.

Training and audit call the very same programs on the same shapes, so an audit gets the same bits.

Shapes in names: M micro-batches of B sequences of T tokens, S = T - 1 predictions, W the length of
a row (columns.py; T for plain data), N tokens of a micro-batch, D width, P peers.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict

import models
from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim import schedules
from pipeline.optim.balance import balanced, leave
from pipeline.optim.optimizer import Optimizer, Tree
from pipeline.programs.loss import measured, targets, weighted_cross_entropy
from pipeline.programs.optimizers import Setting, build, learning_rate_of
from pipeline.programs.placement import keep_cut
from pipeline.stage import memory
from pipeline.tokens.columns import UNCOUNTED, Columns, split
from pipeline.tokens.shards import PLAIN, Column
from pipeline.wire.message import Form, form_of

MOST_UNROLLED = 1000  # layers: XLA takes about a second for each


class PeerResult(NamedTuple):
    """A peer's state after its step, its message, and its loss before the round."""

    own: Tree
    message: Tree
    loss: jax.Array


class Programs:
    """A run's jitted programs.

    Args:
      run: The whole run.
      hf_config: The model's `config.json`.
      first_step: Rounds trained by the run that this one extends, 0 for a new run.
      columns: Columns of the data's rows.

    Raises:
      LockstepError: The run asks for what this model or this data does not support.
    """

    def __init__(
        self,
        run: runfile.Run,
        hf_config: dict,
        first_step: int = 0,
        columns: tuple[Column, ...] = PLAIN,
    ):
        if "sequence_ids" in columns and run.peers.attention == "cudnn":
            raise LockstepError(
                '[peers] attention = "cudnn", expected "matmul": several sequences are packed into '
                "a row of this data, and the fused kernel is not used with a mask of them"
            )
        self.columns = columns
        self.model = models.get(hf_config["model_type"])
        self.model_config = self.model.Config.from_hf(hf_config)
        self._check_size(run)
        learning_rate = learning_rate_of(run.llm.lr_schedule)
        if first_step:  # what Psyche calls a cold start: the first epoch after a pause
            warmup_steps = run.llm.cold_start_warmup_steps
            learning_rate = schedules.cold_start(learning_rate, first_step + 1, warmup_steps)
        groups = {name.split("/")[0] for name in self.model.names}
        setting = Setting(learning_rate, run.peers.overlap, self.model.stacked)
        optimizer = build(run.llm.optimizer, setting, groups)
        self.optimizer = self._balance(optimizer, run.peers.balance_speed)
        self.layout_of_messages = run.peers.wire
        self.parts = run.peers.fsdp
        self.keep_cut = partial(keep_cut, parts=self.parts)
        self.head = partial(self.model.head, self.model_config)
        self.features: Callable[..., jax.Array] = partial(
            self.model.features,
            self.model_config,
            scan=run.peers.scan_layers,
            dtype=jnp.dtype(run.peers.precision),
            attention=run.peers.attention,
            remat=run.peers.remat,
        )

    def _check_size(self, run: runfile.Run) -> None:
        """The least memory that a step needs: the params, and a micro-batch behind the embedding.

        And a number of layers that can be compiled one by one, if they are not scanned.
        """
        layers = self.model_config.num_hidden_layers
        if layers > MOST_UNROLLED and not run.peers.scan_layers:
            raise LockstepError(
                f"[peers] scan_layers = false, expected true for {layers:,} layers: more than "
                f"{MOST_UNROLLED:,} would be compiled one by one"
            )
        limit = run.runtime.memory_gb
        memory.check(self.model.shapes(self.model_config), "the model", limit)
        rows, length = run.peers.micro_batch, run.llm.max_seq_len
        features = jax.ShapeDtypeStruct((rows, length, self.model_config.hidden_size), np.float32)
        memory.check(features, f"[peers] micro_batch = {rows} sequences of {length} tokens", limit)

    def _balance(self, optimizer: Optimizer, speed: float) -> Optimizer:
        """Keeps the optimizer from params whose gradient is the load of experts."""
        paths: list[str] = []
        if named := self.model.balance:  # a model may have no layer with experts
            shapes = self.model.shapes(self.model_config)
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
    def form(self) -> Form:
        """The form of the run's messages."""
        shapes = self.model.shapes(self.model_config)
        return form_of(self.optimizer, shapes, self.layout_of_messages)

    @cached_property
    def init(self) -> Callable[[Tree], tuple[Tree, Tree]]:
        """The states before the first step: (params) -> own, shared."""
        return jax.jit(lambda params: self.keep_cut(self.optimizer.init(params)))

    @cached_property
    def peer_step(self) -> Callable[..., PeerResult]:
        """A peer's step, see `step_of_a_peer`: (params, own, shared, rows_MBW, count, step).

        It donates `own`.
        """
        return jax.jit(self.step_of_a_peer, donate_argnums=1)

    @cached_property
    def gradient(self) -> Callable[[Tree, jax.Array, jax.Array], tuple[jax.Array, Tree]]:
        """A peer's gradient, for benchmarks: (params, rows_MBW, count) -> loss, gradient."""
        return jax.jit(self._gradient)

    @cached_property
    def receive(self) -> Callable[[Tree, jax.Array, Tree, Tree, jax.Array], tuple[Tree, Tree]]:
        """The update of all: (messages, weight_P, params, shared, step) -> params, shared."""
        return jax.jit(self._receive)

    @cached_property
    def compare(self) -> Callable[..., tuple[jax.Array, Tree]]:
        """An audit's step on other hardware: arguments of `peer_step`, message -> distance, own.

        The distance of the sent message from the replayed one, and the peer's state after sending
        it (`Optimizer.compare`).
        """
        return jax.jit(self._compare)

    @cached_property
    def measure(self) -> Callable[[Tree, jax.Array], jax.Array]:
        """Each row's mean cross-entropy over tokens that count: (params, rows_BW) -> loss_B."""
        return jax.jit(lambda params, rows: measured(*self._read(params, rows)))

    def step_of_a_peer(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        rows_MBW: jax.Array,
        count: jax.Array,
        step: jax.Array,
    ) -> PeerResult:
        """Gradient on `count` sequences, accumulated in the optimizer's state, and the message.

        Args:
          params: Params that all peers agree on.
          own: The peer's own part of the optimizer's state.
          shared: The part that is one copy for all.
          rows_MBW: Rows, int32; those after the first `count` are padding.
          count: Number of sequences assigned to this peer, int32.
          step: The round, int32, from 1.
        """
        own, loss = self._local_steps(params, own, shared, rows_MBW, count, step)
        message, own = self.optimizer.send(own, params, shared, step)
        return PeerResult(self.keep_cut(own), message, loss)

    def _local_steps(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        rows_MBW: jax.Array,
        count: jax.Array,
        step: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        """The peer's state after its local steps of a round, each on its lot, and their mean loss.

        Where there are fewer sequences than local steps, the last lots are empty: nothing is done.
        """
        steps = self.optimizer.inner_steps
        if steps == 1:
            return self._local_step(params, own, shared, rows_MBW, count, step)
        rows_HMBW = rows_MBW.reshape(steps, -1, *rows_MBW.shape[1:])

        def take(h: jax.Array, before: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
            own, total = before
            lot = count // steps + (h < count % steps)
            done = step - 1 + (h + 1) / steps  # rounds
            after, loss = self._local_step(params, own, shared, rows_HMBW[h], lot, done)
            own = jax.tree.map(partial(jnp.where, lot > 0), after, own)
            return self.keep_cut(own), total + loss

        own, total = jax.lax.fori_loop(0, steps, take, (self.keep_cut(own), jnp.zeros(())))
        return own, total / jnp.minimum(count, steps)

    def _local_step(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        rows_MBW: jax.Array,
        count: jax.Array,
        step: jax.Array,
    ) -> tuple[Tree, jax.Array]:
        ahead = self.optimizer.lookahead(params, own, shared, step)
        loss, grads = self._gradient(ahead, rows_MBW, count)
        return self.optimizer.accumulate(grads, own, params, step), loss

    def _gradient(
        self, params: Tree, rows_MBW: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Tree]:
        """Mean loss and gradient over the first `count` rows.

        Rows have equal weight; where the data has labels, all labels of the batch that count have,
        however it is cut. Without any, loss and gradient are 0.

        The number of micro-batches is dynamic, so a batch ramp or an uneven assignment compiles
        nothing anew; if no peer is ever assigned more than one, there is no loop.
        """
        size = rows_MBW.shape[1]
        weight_MBS = self._label_weights(rows_MBW, count)

        def loss(params: Tree, rows_BW: jax.Array, weight: jax.Array) -> jax.Array:
            x_ND, kernel_DV, rows = self._read(params, rows_BW)
            return weighted_cross_entropy(x_ND, kernel_DV, targets(rows), weight)

        def of_one(micro: jax.Array | int) -> tuple[jax.Array, Tree]:
            # weights of the mean, so no division is left: one pass over all gradients fewer
            if weight_MBS is None:
                weight = jnp.where(micro * size + jnp.arange(size) < count, 1 / count, 0.0)
            else:
                weight = jax.lax.dynamic_index_in_dim(weight_MBS, micro, keepdims=False)
            rows_BW = jax.lax.dynamic_index_in_dim(rows_MBW, micro, keepdims=False)
            return jax.value_and_grad(loss)(params, rows_BW, weight)

        def add(micro: jax.Array, sums: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            return jax.tree.map(jnp.add, sums, of_one(micro))

        if rows_MBW.shape[0] == 1:  # no sums: two passes over all gradients fewer
            value, grads = of_one(0)
        else:
            zero = (jnp.zeros(()), self.keep_cut(jax.tree.map(jnp.zeros_like, params)))
            value, grads = jax.lax.fori_loop(0, (count + size - 1) // size, add, zero)
        return value, self.keep_cut(grads)

    def _read(self, params: Tree, rows_BW: jax.Array) -> tuple[jax.Array, jax.Array, Columns]:
        """Features, the head's kernel, and the rows by column: what the loss takes."""
        rows = split(rows_BW, self.columns)
        positions, sequences = rows.position_ids, rows.sequence_ids
        x_ND = self.features(params, rows.inputs, positions_BT=positions, sequences_BT=sequences)
        return x_ND, self.head(params), rows

    def _label_weights(self, rows_MBW: jax.Array, count: jax.Array) -> jax.Array | None:
        """Each prediction's weight in the mean over labels that count; None without labels.

        [M, B, S]; 0 beyond the first `count` rows.
        """
        labels_MBT = split(rows_MBW, self.columns).labels
        if labels_MBT is None:
            return None
        M, B, _ = labels_MBT.shape
        real_MB = jnp.arange(M * B).reshape(M, B) < count
        counted_MBS = (labels_MBT[:, :, 1:] != UNCOUNTED) & real_MB[:, :, None]
        return counted_MBS / jnp.maximum(counted_MBS.sum(), 1)

    def _receive(
        self, messages: Tree, weight_P: jax.Array, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        updates, shared = self.optimizer.receive(messages, weight_P, params, shared, step)
        params = optax.apply_updates(params, updates)
        return self.keep_cut(params), self.keep_cut(shared)

    def _compare(self, *arguments: Tree) -> tuple[jax.Array, Tree]:
        *work, message = arguments
        own, _ = self._local_steps(*work)
        params, *_, step = work
        return self.optimizer.compare(own, message, params, step)


def micro_batches(rows_NW: np.ndarray, capacity: int, size: int, lots: int = 1) -> np.ndarray:
    """Cut rows into micro-batches of one shape, padded with zeros: [M, B, W].

    Args:
      rows_NW: Sequences assigned to a peer, int32.
      capacity: Largest number of sequences that any peer is assigned.
      size: Sequences in a micro-batch (B).
      lots: Local steps of a round, each of which has M / lots micro-batches: its rows, as many as
        the others' or, of the first ones, one more.
    """
    length = rows_NW.shape[1]
    micro = -(-capacity // (lots * size))  # of a lot
    padded = np.zeros((lots, micro * size, length), np.int32)
    for lot, rows in zip(padded, np.array_split(rows_NW, lots), strict=True):
        lot[: len(rows)] = rows
    return padded.reshape(lots * micro, size, length)
