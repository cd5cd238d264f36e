"""The jitted programs of a task and an optimizer; `peer_step` and `receive` are a whole round.

Training and audit call the very same programs on the same shapes, so an audit gets the same bits.

Shapes in names: M micro-batches of B rows, P peers.
"""

from collections.abc import Callable
from functools import cache, cached_property, partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.errors import LockstepError
from lockstep.machine import memory
from lockstep.optim import optimizer as optim
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree
from lockstep.programs.local_training import (
    Agreed,
    Lots,
    Stepper,
    TracedSteps,
    Work,
    is_large,
    micro_batches,
)
from lockstep.programs.placement import DeviceGroup, keep_cut
from lockstep.programs.task import Task
from lockstep.same_bits.evaluation import same_bits, without_rule
from lockstep.same_bits.operations import hash_of_operations
from lockstep.same_bits.products import OneFlipped, Product
from lockstep.tables.faults import Schedule
from lockstep.wire.facts import MessageFacts, facts_of
from lockstep.wire.message import Form, form_of


class PeerResult(NamedTuple):
    """A peer's state after its step, its message, and its loss before the round.

    The loss is NaN, too, where the state is not finite and the message has no values to show it.
    """

    own: Tree
    message: Tree
    loss: jax.Array


class Programs:
    """The jitted programs of training, of a task and an optimizer.

    Args:
      steps: Who takes local steps; by default they are traced, and a peer's step is one program.
      wire: Encoding of messages, "lockstep" or "psyche".
      parts: Devices over which a peer's arrays are cut.
      lot: Rows of a local step, where a peer with fewer rows takes fewer steps; by default it takes
        as many, on fewer rows each.
      product: The product of matrices in the task, where a peer's step goes by the rules of
        `same_bits` and so has the same bits on every machine; by default it goes as compiled.
    """

    def __init__(
        self,
        task: Task,
        optimizer: Optimizer,
        steps: Stepper | None = None,
        *,
        wire: str = "lockstep",
        parts: int = 1,
        lot: int | None = None,
        product: Product | None = None,
    ):
        self.task, self.optimizer, self.product = task, optimizer, product
        self.lots = Lots(optimizer.inner_steps, lot)
        self.layout_of_messages, self.parts = wire, parts
        self.keep_cut = partial(keep_cut, parts=parts)
        self.broken = cache(self._broken)
        self._stacks: dict[tuple[DeviceGroup, int], tuple[Callable, Callable]] = {}
        if steps is not None:
            self.steps = steps

    @cached_property
    def steps(self) -> Stepper:
        """The stepper that takes peers' local steps in these programs."""
        large = is_large(self.form.size)
        cut, product = self.keep_cut, self.product
        return TracedSteps(self.task, self.optimizer, self.lots, large, cut, product)

    def _broken(self, how: int | None) -> "Programs":
        """Return the programs of a peer with a fault, or of one without (None).

        0: in the other precision. From 1 on: with a flipped bit in this product of a gradient.
        """
        if how is None:
            return self
        task = self.task if how else self.task.imprecise
        product = OneFlipped(self.product, how) if how and self.product else self.product
        wire, parts, lot = self.layout_of_messages, self.parts, self.lots.size
        return Programs(task, self.optimizer, wire=wire, parts=parts, lot=lot, product=product)

    @cached_property
    def form(self) -> Form:
        """The form of the messages of these programs."""
        return form_of(self.optimizer, self.task.shapes, self.layout_of_messages)

    @cached_property
    def init(self) -> Callable[[Tree], tuple[Tree, Tree]]:
        """The program of the states before the first step: (params) -> own, shared."""
        return jax.jit(lambda params: self.keep_cut(self.optimizer.init(params)))

    @cached_property
    def peer_step(self) -> Callable[..., PeerResult]:
        """A peer's step, see `step_of_a_peer`: (params, own, shared, rows_MB, count, step).

        It donates `own`.
        """
        # A program of one peer, not one that maps over all: with `lax.map` inside `shard_map`, an
        # auditor who steps a peer alone got other bits from round 13 on, and accused honest peers.
        step = self.step_of_a_peer
        return jax.jit(step, donate_argnums=1) if self.steps.traced else step

    @cached_property
    def align(self) -> Callable[[Tree, Tree, jax.Array], Tree]:
        """The program of a peer without a step in a round: (own, params, step) -> own.

        It donates `own`.
        """
        return jax.jit(self.align_a_peer, donate_argnums=0)

    @cached_property
    def receive(self) -> Callable[[Tree, RoundPeers, Tree, Tree, jax.Array], tuple[Tree, Tree]]:
        """The program of the update: (messages, peers, params, shared, step) -> params, shared.

        Every machine gets the same bits, unless some operations are `unruled`.
        """
        return jax.jit(same_bits(self.update_of_all))

    def stack_on(
        self, group: DeviceGroup, count: int
    ) -> tuple[Callable[[list[Tree]], Tree], Callable[[], Tree]]:
        """Return what lays messages out as `receive` takes them on a group, and one of zeros.

        The first is of `count` messages on that group. Both compute nothing: values are as they
        were.
        """
        if (group, count) not in self._stacks:
            like = self.form.like
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), like)
            self._stacks[group, count] = (
                jax.jit(
                    lambda rows: jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows),
                    out_shardings=group.layout(rows),
                ),
                jax.jit(
                    lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like),
                    out_shardings=group.layout(like),
                ),
            )
        return self._stacks[group, count]

    @cached_property
    def facts(self) -> Callable[[Tree, list[jax.Array]], MessageFacts]:
        """The facts of messages that stay where they are: (stacked, losses) -> facts of each."""
        of_each = jax.vmap(partial(facts_of, form=self.form))
        return jax.jit(lambda stacked, losses: of_each(stacked, jnp.stack(losses)))

    @cached_property
    def unruled(self) -> frozenset[str]:
        """Operations of the program `receive` whose bits another machine may not repeat."""
        return without_rule(self.update_of_all, *self._shapes_of_update(2))

    def operations(self, rows_MB: Tree, peers: int) -> list[str]:
        """Return hashes of the operations of a round by rules, from which its bits follow.

        They are those of a peer's step on such rows, or their shapes, of its alignment, of the
        update by messages of so many peers, and of what is measured.
        """
        step, scalar = self._shapes_of_step(rows_MB), jax.ShapeDtypeStruct((), np.int32)
        rows_B = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows_MB)
        params, own, *_ = step
        return [
            hash_of_operations(self.peer_step, *step),
            hash_of_operations(self.align, own, params, scalar),
            hash_of_operations(self.receive, *self._shapes_of_update(peers)),
            hash_of_operations(self.steps.measure, params, rows_B),
        ]

    def _shapes_of_step(self, rows_MB: Tree) -> tuple[Tree, ...]:
        scalar = jax.ShapeDtypeStruct((), np.int32)
        own, shared = jax.eval_shape(self.optimizer.init, self.task.shapes)
        return self.task.shapes, own, shared, rows_MB, scalar, scalar

    def _shapes_of_update(self, peers: int) -> tuple[Tree, ...]:
        of_all = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((peers, *x.shape), x.dtype), self.form.like
        )
        per_peer = jax.ShapeDtypeStruct((peers,), np.int32)
        params, _, shared, *_, step = self._shapes_of_step(())
        return of_all, RoundPeers(per_peer, per_peer, per_peer), params, shared, step

    def check_rules(self, row: Tree, where: str, faults: Schedule) -> None:
        """Check that each operation of a step by rules has a rule, and each flipped product is one.

        `row` is a row, or its shape and type; errors on rules begin with `where`.
        """
        if self.product and (unruled := self.unruled_in_a_step(row)):
            raise LockstepError(
                f'{where} "everywhere", expected "machine": there is no rule for '
                f"{', '.join(sorted(unruled))}"
            )
        for size in {int(one.strength or 0) for one in faults if one.kind == "bit_flip"}:
            (broken := self.broken(size)).unruled_in_a_step(row)
            if (most := size - min(getattr(broken.product, "all_left", ()), default=size)) < size:
                raise LockstepError(f"bit_flip: size is {size}, expected at most {most} products")

    def unruled_in_a_step(self, row: Tree) -> frozenset[str]:
        """Return operations of a peer's step whose bits another machine may not repeat."""
        steps = self.lots.steps
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((steps, 1, *x.shape), x.dtype), row)
        return without_rule(self._step_of_a_peer, *self._shapes_of_step(rows))

    def large(self, peers: int) -> bool:
        """Return whether the messages of so many peers are too large for programs to hold here.

        Then they lie on disk until their round is over. That changes no bit.
        """
        return self.form.large(peers, memory.room(self.parts))

    def merges_in_parts(self, peers: int) -> bool:
        """Return whether programs merge such messages a slice at a time, see `merge_parts`."""
        return self.optimizer.merge is not None and self.large(peers)

    @cached_property
    def aggregate(self) -> Callable[[Tree, np.ndarray], Tree]:
        """The program of a merge of elements: (values, weight) -> values, the bits of `receive`."""
        assert self.optimizer.merge is not None
        return jax.jit(same_bits(self.optimizer.merge.aggregate))

    @cached_property
    def take(self) -> Callable[[Tree, Tree, Tree, jax.Array], tuple[Tree, Tree]]:
        """The program of merged messages: (merged, params, shared, step) -> params, shared.

        It donates `merged`, in whose memory the new params are, and `shared`.
        """
        shapes = [[x.shape for x in jax.tree.leaves(x)] for x in (self.form.like, self.task.shapes)]

        def take(merged: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
            updates, shared = self.optimizer.merge.take(merged, params, shared, step)
            return self._moved(params, updates, shared)

        return jax.jit(same_bits(take), donate_argnums=(0, 2) if shapes[0] == shapes[1] else 2)

    @cached_property
    def step_of_a_peer(self) -> Callable[..., PeerResult]:
        """A peer's step: (params, own, shared, rows_MB, count, step) -> PeerResult.

        The gradient on the first `count` rows, accumulated in the peer's own state, and the
        message. `step` is the round, int32, from 1; rows after the first `count` are padding.
        """
        return self._by_rules(self._step_of_a_peer)

    @cached_property
    def align_a_peer(self) -> Callable[[Tree, Tree, jax.Array], Tree]:
        """A peer's state after it adopted the commit of the round before: (own, params, step)."""
        return self._by_rules(self._align_a_peer)

    def _by_rules(self, function: Callable[..., Tree]) -> Callable[..., Tree]:
        return same_bits(function) if self.product else function

    def _step_of_a_peer(
        self,
        params: Tree,
        own: Tree,
        shared: Tree,
        rows_MB: Tree,
        count: jax.Array,
        step: jax.Array,
    ) -> PeerResult:
        own, loss = self.steps.take(own, Agreed(params, shared), Work(rows_MB, count), step)
        message, own = self.optimizer.send(own, params, shared, step)
        own = self.keep_cut(own)
        if not _floats(message):  # signs are finite, whatever they are the signs of
            finite = [jnp.isfinite(x).all() for x in _floats(own)]
            loss = jnp.where(reduce(jnp.logical_and, finite, True), loss, jnp.nan)
        return PeerResult(own, message, loss)

    def _align_a_peer(self, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return self.keep_cut(optim.align(self.optimizer, own, params, step))

    def update_of_all(
        self, messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        """Do what the program `receive` does: params and shared state after a round's messages."""
        updates, shared = self.optimizer.receive(messages, peers, params, shared, step)
        return self._moved(params, updates, shared)

    def work(self, rows_N: Tree, most: int, size: int) -> Work:
        """Return a peer's work of a round, cut for its program as `micro_batches` cuts rows."""
        count = len(jax.tree.leaves(rows_N)[0])
        return Work(micro_batches(rows_N, most, size, *self.lots), count)

    def _moved(self, params: Tree, updates: Tree, shared: Tree) -> tuple[Tree, Tree]:
        return self.keep_cut(optax.apply_updates(params, updates)), self.keep_cut(shared)


def _floats(tree: Tree) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
