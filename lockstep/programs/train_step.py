"""The jitted programs of a task and an optimizer; `peer_step` and `receive` are a whole round.

Training and audit call the very same programs on the same shapes, so an audit gets the same bits.

Shapes in names: M micro-batches of B rows, P peers.
"""

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.optim import optimizer as optim
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree
from lockstep.programs.placement import DeviceGroup, keep_cut
from lockstep.programs.same_bits.evaluate import same_bits, without_rule
from lockstep.programs.task import Task
from lockstep.wire import message as wire
from lockstep.wire.message import Form, form_of


class PeerResult(NamedTuple):
    """A peer's state after its step, its message, and its loss before the round."""

    own: Tree
    message: Tree
    loss: jax.Array


class Agreed(NamedTuple):
    """The state that all peers agree on: the params, and the optimizer's shared state."""

    params: Tree
    shared: Tree


class Work(NamedTuple):
    """What a peer trains on in a round, or in one of its local steps.

    Rows are in micro-batches, arrays [M, B, ...]; those after the first `count` are padding.
    """

    rows_MB: Tree
    count: int | jax.Array


class Programs:
    """The jitted programs of a task and an optimizer.

    Args:
      task: What is trained.
      optimizer: How peers train it.
      wire: Encoding of messages, "lockstep" or "psyche".
      parts: Devices over which a peer's arrays are cut.
      lot: Rows of a local step, where a peer with fewer rows takes fewer steps; by default it takes
        as many, on fewer rows each.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        *,
        wire: str = "lockstep",
        parts: int = 1,
        lot: int | None = None,
    ):
        self.task, self.optimizer, self.lot = task, optimizer, lot
        self.layout_of_messages, self.parts = wire, parts
        self.keep_cut = partial(keep_cut, parts=parts)

    @cached_property
    def imprecise(self) -> "Programs":
        """The same programs in the other precision, for a peer with that fault."""
        wire, parts = self.layout_of_messages, self.parts
        return Programs(self.task.imprecise, self.optimizer, wire=wire, parts=parts, lot=self.lot)

    @cached_property
    def form(self) -> Form:
        """The form of the run's messages."""
        return form_of(self.optimizer, self.task.shapes, self.layout_of_messages)

    @cached_property
    def init(self) -> Callable[[Tree], tuple[Tree, Tree]]:
        """The states before the first step: (params) -> own, shared."""
        return jax.jit(lambda params: self.keep_cut(self.optimizer.init(params)))

    @cached_property
    def peer_step(self) -> Callable[..., PeerResult]:
        """A peer's step, see `step_of_a_peer`: (params, own, shared, rows_MB, count, step).

        It donates `own`.
        """
        return jax.jit(self.step_of_a_peer, donate_argnums=1)

    def put_rows(self, group: DeviceGroup, rows_MB: Tree) -> Tree:
        """Put the rows of a step on the device that computes it."""
        return group.put_rows(rows_MB, axis=1)

    def compile_step(self, arguments: tuple) -> None:
        """Compile a peer's step for such arguments; nothing is computed."""
        self.peer_step.lower(*arguments).compile()

    def read_files_from(self, shards: Path) -> None:
        """Have rows that are names of files be looked up in a folder; these programs read none."""

    @property
    def measures(self) -> bool:
        """Whether the task gives the loss of any row."""
        return True

    def close(self) -> None:
        """Let go of processes that compute for it: this class has none."""

    @property
    def environment(self) -> dict[str, str]:
        """What can change bits beside the versions and devices of JAX: nothing."""
        return {}

    @cached_property
    def align(self) -> Callable[[Tree, Tree, jax.Array], Tree]:
        """What a peer that takes no step in a round does: (own, params, step) -> own.

        It donates `own`.
        """
        return jax.jit(self.align_a_peer, donate_argnums=0)

    @cached_property
    def gradient(self) -> Callable[..., tuple[jax.Array, Tree]]:
        """A peer's gradient, for benchmarks: (params, rows_MB, count) -> loss, gradient."""
        return jax.jit(self._gradient)

    @cached_property
    def receive(self) -> Callable[[Tree, RoundPeers, Tree, Tree, jax.Array], tuple[Tree, Tree]]:
        """The update that all apply: (messages, peers, params, shared, step) -> params, shared.

        Every machine gets the same bits, unless some operations are `unruled`.
        """
        return jax.jit(same_bits(self.update_of_all))

    @cached_property
    def unruled(self) -> frozenset[str]:
        """Operations of `receive` whose bits another machine may not repeat; of ours none."""
        like = self.form.like
        messages = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), like)
        each, step = jax.ShapeDtypeStruct((2,), np.int32), jax.ShapeDtypeStruct((), np.int32)
        shared = jax.eval_shape(self.optimizer.init, self.task.shapes)[1]
        peers = RoundPeers(each, each, each)
        arguments = (messages, peers, self.task.shapes, shared, step)
        return without_rule(self.update_of_all, *arguments)

    @property
    def merges_in_parts(self) -> bool:
        """Whether messages are so large that they are merged on the host, see `merge_parts`."""
        return self.form.large and self.optimizer.merge is not None

    @cached_property
    def take(self) -> Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]:
        """`receive` of messages that are one: (merged, params, shared, step) -> params, shared.

        It donates `merged`, in whose memory the new params are, and `shared`.
        """
        shapes = [[x.shape for x in jax.tree.leaves(x)] for x in (self.form.like, self.task.shapes)]
        return jax.jit(
            same_bits(self._take), donate_argnums=(0, 2) if shapes[0] == shapes[1] else 2
        )

    @cached_property
    def compare(self) -> Callable[..., tuple[jax.Array, Tree]]:
        """An audit's step on other hardware: arguments of `peer_step`, message -> distance, own.

        The distance of the sent message from the replayed one, and the peer's state after sending
        it (`Optimizer.compare`).
        """
        return jax.jit(self._compare)

    @cached_property
    def measure(self) -> Callable[[Tree, Tree], jax.Array]:
        """What the task measures of rows: (params, rows_B) -> loss, see `Task.measure`."""
        return jax.jit(self.task.measure)

    def step_of_a_peer(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        rows_MB: Tree,
        count: jax.Array,
        step: jax.Array,
    ) -> PeerResult:
        """Gradient on `count` rows, accumulated in the optimizer's state, and the message.

        Args:
          params: Params that all peers agree on.
          own: The peer's own part of the optimizer's state.
          shared: The part that is one copy for all.
          rows_MB: Rows, arrays [M, B, ...]; those after the first `count` are padding.
          count: Number of rows assigned to this peer, int32.
          step: The round, int32, from 1.
        """
        own, loss = self._local_steps(own, Agreed(params, shared), Work(rows_MB, count), step)
        message, own = self._send(own, params, shared, step)
        return PeerResult(self.keep_cut(own), message, loss)

    def align_a_peer(self, own: Tree, params: Tree, step: jax.Array) -> Tree:
        """Return a peer's state after it adopted the commit of the round before `step`."""
        return self.keep_cut(optim.align(self.optimizer, own, params, step))

    def update_of_all(
        self, messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        """Return params and shared state after a round's messages, see `Optimizer.receive`."""
        updates, shared = self.optimizer.receive(messages, peers, params, shared, step)
        return self._moved(params, updates, shared)

    def work(self, rows_N: Tree, most: int, size: int) -> Work:
        """Return a peer's work of a round, cut for its local steps as `micro_batches` cuts rows."""
        count = len(jax.tree.leaves(rows_N)[0])
        return Work(micro_batches(rows_N, most, size, self.optimizer.inner_steps, self.lot), count)

    def lot_of(self, count: Any, local: Any) -> Any:
        """Return how many of a peer's `count` rows its local step `local` uses.

        The steps are counted from 0. Integers or int32 arrays, as those that are given.
        """
        steps = self.optimizer.inner_steps
        if self.lot is None:
            return count // steps + (local < count % steps)
        return (count - local * self.lot).clip(0, self.lot)

    def steps_of(self, count: Any) -> Any:
        """Return how many local steps a peer takes on so many rows: int32 arrays of any shape."""
        if self.lot is None:
            return count.clip(0, self.optimizer.inner_steps)
        return -(-count // self.lot)

    def _local_steps(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array
    ) -> tuple[Tree, jax.Array]:
        """Return the peer's state after its local steps, each on its lot, and their mean loss.

        With fewer rows than local steps, the last lots are empty: nothing is done.
        """
        steps, count = self.optimizer.inner_steps, work.count
        if steps == 1:
            own = optim.align(self.optimizer, own, agreed.params, step)
            return self._local_step(own, agreed, work, step, self.task.key(work.rows_MB, step, 0))
        rows_HMB = jax.tree.map(lambda x: x.reshape(steps, -1, *x.shape[1:]), work.rows_MB)

        def take(h: jax.Array, before: tuple[Tree, jax.Array]) -> tuple[Tree, jax.Array]:
            own, total = before
            own = optim.align_before(self.optimizer, own, agreed.params, step, h)
            lot = self.lot_of(count, h)
            done = step - 1 + (h + 1) / steps  # rounds
            rows_MB = jax.tree.map(lambda x: x[h], rows_HMB)
            key = self.task.key(rows_MB, step, h)

            def train(own: Tree) -> tuple[Tree, jax.Array]:
                return self._local_step(own, agreed, Work(rows_MB, lot), done, key)

            if self._branches:
                own, loss = jax.lax.cond(lot > 0, train, lambda own: (own, jnp.zeros(())), own)
            else:
                after, loss = train(own)
                own = jax.tree.map(partial(jnp.where, lot > 0), after, own)
            return self.keep_cut(own), total + loss

        own, total = jax.lax.fori_loop(0, steps, take, (self.keep_cut(own), jnp.zeros(())))
        return own, total / (
            jnp.minimum(count, steps) if self.lot is None else self.steps_of(count)
        )

    @property
    def _branches(self) -> bool:
        """Whether a local step without rows is a branch, and no choice between two states.

        A choice needs both at once, which is much where the params are large. Programs of smaller
        ones keep it: the last bits are others.
        """
        return 4 * self.form.size >= wire.LARGE_BYTES

    def _local_step(
        self, own: Tree, agreed: Agreed, work: Work, step: jax.Array, key: jax.Array | None
    ) -> tuple[Tree, jax.Array]:
        """Take one local step; `step` is as in `Optimizer`."""
        ahead = self.optimizer.lookahead(agreed.params, own, agreed.shared, step)
        loss, grads = self._gradient(ahead, *work, key)
        return self.optimizer.accumulate(grads, own, agreed.params, step), loss

    def _gradient(
        self, params: Tree, rows_MB: Tree, count: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, Tree]:
        """Return mean loss and gradient over the first `count` rows, weighted by the task.

        The number of micro-batches is dynamic, so a batch ramp or an uneven assignment compiles
        nothing anew; if no peer is ever assigned more than one, there is no loop.
        """
        micro_batches, size = jax.tree.leaves(rows_MB)[0].shape[:2]
        weigh = self.task.weights(rows_MB, count)

        def on_micro_batch(micro: jax.Array | int) -> tuple[jax.Array, Tree]:
            weight = weigh(micro)
            rows_B = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, micro, keepdims=False), rows_MB
            )
            rng = None if key is None else jax.random.fold_in(key, micro)
            return jax.value_and_grad(self.task.loss)(params, rows_B, weight, rng)

        def add(micro: jax.Array, sums: tuple[jax.Array, Tree]) -> tuple[jax.Array, Tree]:
            return jax.tree.map(jnp.add, sums, on_micro_batch(micro))

        if micro_batches == 1:  # no sums: two passes over all gradients fewer
            value, grads = on_micro_batch(0)
        else:
            zero = (jnp.zeros(()), self.keep_cut(jax.tree.map(jnp.zeros_like, params)))
            value, grads = jax.lax.fori_loop(0, (count + size - 1) // size, add, zero)
        return value, self.keep_cut(grads)

    def _take(self, merged: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        assert self.optimizer.merge is not None
        updates, shared = self.optimizer.merge.take(merged, params, shared, step)
        return self._moved(params, updates, shared)

    def _moved(self, params: Tree, updates: Tree, shared: Tree) -> tuple[Tree, Tree]:
        return self.keep_cut(optax.apply_updates(params, updates)), self.keep_cut(shared)

    def _compare(self, *arguments: Tree) -> tuple[jax.Array, Tree]:
        params, own, shared, rows_MB, count, step, message = arguments
        own, _ = self._local_steps(own, Agreed(params, shared), Work(rows_MB, count), step)
        return self._compare_sent(own, message, params, step)

    @cached_property
    def _send(self) -> Callable[..., tuple[Tree, Tree]]:
        return self.optimizer.send

    @cached_property
    def _compare_sent(self) -> Callable[..., tuple[jax.Array, Tree]]:
        return self.optimizer.compare


def micro_batches(
    rows_N: Tree, capacity: int, size: int, lots: int = 1, lot: int | None = None
) -> Tree:
    """Cut rows into micro-batches of one shape, padded with zeros: [M, B, ...].

    Args:
      rows_N: Rows assigned to a peer, NumPy arrays [N, ...].
      capacity: Largest number of rows that any peer is assigned.
      size: Rows in a micro-batch (B).
      lots: Local steps of a round, each of which has M / lots micro-batches: its rows, as many as
        the others' or, of the first ones, one more.
      lot: Rows of each local step, as long as there are any; by default all have about as many.
    """
    micro = -(-capacity // (lots * size))  # of a lot

    def cut(rows_N: np.ndarray) -> np.ndarray:
        shape = rows_N.shape[1:]
        padded = np.zeros((lots, micro * size, *shape), rows_N.dtype)
        ends = lots if lot is None else range(lot, lots * lot, lot)
        for part, rows in zip(padded, np.array_split(rows_N, ends), strict=True):
            part[: len(rows)] = rows
        return padded.reshape(lots * micro, size, *shape)

    return jax.tree.map(cut, rows_N)
