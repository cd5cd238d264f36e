"""A round's two programs, called with their arguments laid out on a device group.

Trainers, verifiers, the self-test and an audit's replay all call `Replica.step` and
`Replica.receive`: one program on one layout of the same shapes, which is why they get one result.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from lockstep.optim.optimizer import RoundPeers, Tree
from lockstep.programs.local_training import Work
from lockstep.programs.placement import DeviceGroup
from lockstep.programs.train_step import PeerResult, Programs
from lockstep.protocol.closing import age_of, slot
from lockstep.wire import spool


class RoundMerge(NamedTuple):
    """The messages that a round applies, and how much each of them counts; all by slot."""

    messages: Mapping[int, Tree]
    sequences: Mapping[int, int]  # on how many each of them was computed
    step: int  # the round
    weights: Mapping[int, int]  # in means over the peers

    def is_same(self, other: "RoundMerge") -> bool:
        """Return whether another one has the same result: it is of the very same trees."""
        mine, others = self.messages, other.messages
        return (
            mine.keys() == others.keys()
            and all(mine[slot] is others[slot] for slot in mine)
            and self[1:] == other[1:]
        )


@dataclass(frozen=True)
class Replica:
    """What all peers agree on: params and the optimizer's shared state, on one device group."""

    programs: Programs
    group: DeviceGroup
    params: Tree
    shared: Tree

    @classmethod
    def put(cls, programs: Programs, group: DeviceGroup, params: Tree, shared: Tree) -> "Replica":
        """Copy a replica, params and the optimizer's shared state, to a device group."""
        return cls(programs, group, *group.put((params, shared)))

    def new_own(self) -> Tree:
        """Return a new peer's own state at this replica's params."""
        return self.programs.init(self.params)[0]

    def compile_step(self, own: Tree, work: Work) -> None:
        """Compile a peer's step from this replica for such a state and work; computes nothing."""
        if self.programs.steps.traced:  # else parts of it are compiled as they are first called
            self.programs.peer_step.lower(*self.arguments(own, work, 1)).compile()

    def step(self, own: Tree, work: Work, step: int) -> PeerResult:
        """Take a peer's step from this replica and its state, which is donated; does not wait."""
        return self.programs.peer_step(*self.arguments(own, work, step))

    def align(self, own: Tree, step: int) -> Tree:
        """Return an idle peer's state, donated, aligned with this replica in round `step`."""
        if not self.programs.optimizer.aligns:
            return own
        return self.programs.align(own, self.params, self.group.whole(np.int32(step)))

    def receive(self, merge: RoundMerge, count: int, stacked: Tree | None = None) -> "Replica":
        """Return the replica after messages of some of the run's `count` peers.

        They are `stacked` to one tree, if they are not already. Messages of earlier rounds follow,
        as many rows again for each age up to the oldest's. Large messages are never stacked whole;
        then the shared state of this replica is donated.
        """
        messages, sequences, step, weights = merge
        ages = range(max(map(age_of, messages), default=0) + 1)
        slots = [slot(peer, age) for age in ages for peer in range(count)]
        trained, weight = (
            np.array([by_slot[slot] if slot in messages else 0 for slot in slots], np.int32)
            for by_slot in (sequences, weights)
        )
        age = np.array([age_of(slot) if slot in messages else 0 for slot in slots], np.int32)
        peers = RoundPeers(weight, age, self.programs.lots.steps_for(trained))
        peers, step = self.group.whole((peers, np.int32(step)))
        if self.programs.merges_in_parts(count):
            like = self.programs.form.like
            absent = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
            rows = [messages.get(slot, absent) for slot in slots]
            merged = merge_parts(self.programs, self.group, rows, weight)
            params, shared = self.programs.take(merged, self.params, self.shared, step)
        else:
            if stacked is None:
                stacked = self.stacked([messages.get(slot) for slot in slots])
            params, shared = self.programs.receive(stacked, peers, self.params, self.shared, step)
        return replace(self, params=params, shared=shared)

    def stacked(self, rows: Sequence[Tree | None]) -> Tree:
        """Return messages as one tree with a leading axis [peer], on this group.

        They may lie on the host, on this group or on another. There is a row for every peer, zero
        where there is no message, and all are on this group: what does not depend on who is absent,
        nor on whose message was decoded, is compiled once.
        """
        here = set(self.group.devices)

        def brought(row: Tree) -> Tree:
            leaf = jax.tree.leaves(row)[0]
            is_here = isinstance(leaf, jax.Array) and leaf.devices() == here
            return row if is_here else self.group.put(row)

        stack, nothing = self.programs.stack_on(self.group, len(rows))
        absent = nothing() if any(row is None for row in rows) else None
        return stack([absent if row is None else brought(row) for row in rows])

    def arguments(self, own: Tree, work: Work, step: int) -> tuple:
        """Return the arguments of `Programs.peer_step`, on this replica's group."""
        rows_MB = work.rows_MB
        if self.programs.steps.traced:  # else they are read on the host
            rows_MB = self.group.rows(rows_MB, axis=1)
        count, step = self.group.whole((np.int32(work.count), np.int32(step)))
        return self.params, own, self.shared, rows_MB, count, step


AT_ONCE = 2**24  # elements of all peers that are merged at once


def merge_parts(
    programs: Programs, group: DeviceGroup, messages: Sequence[Tree], weight: np.ndarray
) -> Tree:
    """Return the merged messages of all peers, on a device group.

    One slice of an array is merged at a time, by the rules of `receive`, which give it the same
    bits. So a device needs one more copy of the params, and not one for each peer; the host needs
    an array of it, and the messages themselves, which may be on disk.

    The optimizer has a `merge`. `messages` may hold anything for an absent peer, of weight 0.
    """
    leaves = zip(*map(jax.tree.leaves, messages), strict=True)
    merged = [group.put_owned(_merge(programs, rows, weight)) for rows in leaves]
    return jax.tree.unflatten(jax.tree.structure(programs.form.like), merged)


def _merge(programs: Programs, rows: Sequence[np.ndarray], weight: np.ndarray) -> np.ndarray:
    """Merge one array of the messages to a replica."""
    merged = np.empty(rows[0].shape, rows[0].dtype)
    flat, rows = merged.reshape(-1), [np.asarray(row).reshape(-1) for row in rows]
    # all slices are of one shape, for which a program is compiled
    width = max(1, min(len(flat), AT_ONCE // len(rows)))
    slices = np.zeros((len(rows), width), merged.dtype)
    for first in range(0, len(flat), width):
        part = flat[first : first + width]
        for row, values in zip(rows, slices, strict=True):
            values[: len(part)] = row[first : first + len(part)]
        part[:] = np.asarray(programs.aggregate(slices, weight))[: len(part)]
        spool.drop_pages(rows)
    return merged
