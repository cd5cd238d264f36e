"""The memory that peers and their programs need on a device, from XLA's own plan of each.

Programs are compiled as training compiles them, and not run: nothing of their size is allocated.
"""

import math
from typing import NamedTuple

import jax
import numpy as np

from lockstep.machine import memory
from lockstep.optim.optimizer import RoundPeers, Tree
from lockstep.programs.local_training import Work
from lockstep.programs.placement import DeviceGroup, PlannedGroup, device_groups
from lockstep.programs.replica import Replica
from lockstep.programs.train_step import Programs


class ProgramMemory(NamedTuple):
    """Memory of a program on one device, in bytes.

    Attributes:
      arguments: Its arguments.
      outputs: Its results; those that are donated arguments take no memory of their own.
      donated: Arguments in whose memory results are written.
      temporary: What it needs while it runs.
    """

    arguments: int
    outputs: int
    donated: int
    temporary: int

    @classmethod
    def of(cls, program: jax.stages.Wrapped, *arguments: Tree) -> "ProgramMemory | None":
        """Return XLA's memory plan of a program for these arguments; None without one."""
        plan = program.lower(*arguments).compile().memory_analysis()
        return plan and cls(
            plan.argument_size_in_bytes,
            plan.output_size_in_bytes,
            plan.alias_size_in_bytes,
            plan.temp_size_in_bytes,
        )

    @property
    def beyond(self) -> int:
        """Bytes of memory that a program needs on a device besides its arguments."""
        return self.outputs - self.donated + self.temporary


class DeviceMemory(NamedTuple):
    """Bytes that a run's arrays and programs take on the devices here.

    Attributes:
      groups: Number of device groups that peers run on.
      parts: Devices of a group, `[peers] fsdp`.
      peers: Number of peers.
      agreed: Params and the optimizer's one copy, on each device.
      own: What one peer owns, on a device.
      message: A peer's message, as arrays.
      large: Whether messages are on disk, and merged a slice of an array at a time.
      step: A peer's step, of which each device runs one at a time.
      receive: The update of all, which the first device computes.
      measure: The loss of some held-out rows.
      limit: What a device has.
      process: What this process takes with all programs loaded and no arrays, if it was measured.
      in_one: Whether all devices are of one memory, as the processors of a machine are.
    """

    groups: int
    parts: int
    peers: int
    agreed: int
    own: int
    message: int
    large: bool
    step: ProgramMemory
    receive: ProgramMemory
    measure: ProgramMemory
    limit: int
    process: int | None
    in_one: bool

    @property
    def needed(self) -> int:
        """Bytes of memory to compare with `limit`: of one device, or of all that share one."""
        return self.on_all_devices if self.in_one else self.on_each_device

    @property
    def on_each_device(self) -> int:
        """Bytes of memory of one device at the worst moment, if each has its own."""
        turns = -(-self.peers // self.groups)
        return self._worst(1, turns)

    @property
    def on_all_devices(self) -> int:
        """Bytes of memory of all devices together at the worst moment."""
        return self.parts * self._worst(self.groups, self.peers)

    @property
    def whole_process(self) -> int | None:
        """Bytes of memory of the process at the worst moment, if devices share it.

        That is while rounds go on and a checkpoint is saved: with a copy of all state; with the
        state of the start; and with all messages as bytes, or one of them where they are large.
        The allocator's pool has the buffers of a step twice: they seldom fit where those of the
        last one lay. It was 1.4 times after 4 rounds of a large model, and 2.6 times after 200 of a
        small one (benchmarks/RESULTS.md).
        """
        if self.process is None:
            return None
        start, state = self.agreed + self.own, self.agreed + self.peers * self.own
        messages = self.message * (1 if self.large else self.peers)
        pool = self.groups * self.step.beyond
        return self.process + self.on_all_devices + self.parts * (start + state + messages + pool)

    def _worst(self, groups: int, peers: int) -> int:
        message = 0 if self.large else self.message  # which stays until the round is decided
        stepping = groups * self.step.beyond + (peers - groups) * message
        # all are on the first group, and stacked; the result is copied to every group before the
        # old copies are gone
        receiving = self.receive.arguments + self.receive.beyond + (groups - 2) * self.agreed
        receiving += self.peers * message
        measuring = groups * self.measure.beyond
        return groups * self.agreed + peers * self.own + max(stepping, receiving, measuring)


def device_memory(
    programs: Programs,
    peers: int,
    work: Work,
    measured_B: Tree | None = None,
    *,
    load_all: bool = False,
) -> DeviceMemory | None:
    """Return the memory that peers take on the devices; None if the backend does not report it.

    It is that of layout "each", the only one that runs a peer's step as a program of its own. Only
    the shapes count of a peer's work in a round, and of the held-out rows [B, ...] of one
    measurement. `load_all` loads the programs for every device, and then measures this process.
    """
    groups = device_groups(jax.devices(), programs.parts)[:peers]
    replica, own = _planned(programs, groups[0])
    group, like = replica.group, programs.form.like
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((peers, *x.shape), x.dtype), like)
    absent = RoundPeers.synchronous(np.zeros(peers, np.int32))
    absent, step = group.whole((absent, np.int32(1)))
    step_memory = ProgramMemory.of(programs.peer_step, *replica.arguments(own, work, 1))
    agreed = replica.params, replica.shared, step
    if programs.merges_in_parts(peers):
        receive = ProgramMemory.of(programs.take, group.put(like), *agreed)
    else:
        receive = ProgramMemory.of(programs.receive, group.put(stacked), absent, *agreed)
    measure: ProgramMemory | None = ProgramMemory(0, 0, 0, 0)
    if measured_B is not None:
        rows_B = group.rows(measured_B, axis=0)
        measure = ProgramMemory.of(programs.steps.measure, replica.params, rows_B)
    if None in (receive, step_memory, measure):
        return None
    in_one = group.devices[0].platform == "cpu"
    process = None
    if load_all and in_one:  # a machine's processors hold the programs of each in one memory
        for other in groups[1:]:
            replica, own = _planned(programs, other)
            ProgramMemory.of(programs.peer_step, *replica.arguments(own, work, 1))
            if measured_B is not None:
                rows_B = replica.group.rows(measured_B, axis=0)
                ProgramMemory.of(programs.steps.measure, replica.params, rows_B)
        process = memory.resident()
    return DeviceMemory(
        groups=len(groups),
        parts=programs.parts,
        peers=peers,
        agreed=_bytes((replica.params, replica.shared)),
        own=_bytes(own),
        message=_bytes(group.put(like)),
        large=programs.large(peers),
        step=step_memory,
        receive=receive,
        measure=measure,
        limit=(group.devices[0].memory_stats() or {}).get("bytes_limit") or memory.total(),
        process=process,
        in_one=in_one,
    )


def _planned(programs: Programs, group: DeviceGroup) -> tuple[Replica, Tree]:
    """Return shapes of the shared and of one peer's own state, as laid out in a group's memory."""
    params, planned = programs.task.shapes, PlannedGroup(group.devices)
    own, shared = jax.eval_shape(programs.optimizer.init, params)
    return Replica.put(programs, planned, params, shared), planned.put(own)


def _bytes(tree: Tree) -> int:
    """Return the bytes that arrays take in one device's memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
