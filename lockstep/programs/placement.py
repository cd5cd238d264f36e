"""The devices a peer computes on: one, or a group of `[peers] fsdp` that hold its arrays in parts.

Each array is cut along its longest axis that the devices divide, and a batch by its sequences. XLA
gathers each operand just before its product, and leaves each device its part of a gradient: fully
sharded data parallelism, by annotations alone.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from queue import SimpleQueue
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as Spec

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree

AXIS = "fsdp"
GATHERED_BYTES = 2**26  # on their way from the devices of several processes to the host at once
Item, Returned = TypeVar("Item"), TypeVar("Returned")


@dataclass(frozen=True)
class DeviceGroup:
    """A group of devices, on which one peer's arrays are placed."""

    devices: tuple[jax.Device, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.devices))

    def put(self, tree: Tree) -> Tree:
        """Put params, states or messages on the device group: each array in parts, one a device."""
        parts = len(self.devices)
        return self._put(tree, lambda x: cut(x.shape, parts))

    def layout(self, tree: Tree) -> Tree:
        """Return how `put` lays out arrays of these shapes on the devices."""
        parts = len(self.devices)
        return jax.tree.map(lambda x: self._on(cut(x.shape, parts)), tree)

    def put_owned(self, array: np.ndarray) -> jax.Array:
        """Put an array on the devices as `put` does, in memory that a program may reuse."""
        if self._spans_processes:
            return self.put(array)
        return jax.device_put(array, self._on(cut(array.shape, len(self.devices))), may_alias=False)

    def whole(self, tree: Tree) -> Tree:
        """Return a program's arguments on the device group: each array whole on every device.

        On one device they stay as they are: a call takes NumPy's arrays to where the others lie, in
        a fraction of the time.
        """
        return self._put(tree, lambda _: Spec()) if len(self.devices) > 1 else tree

    def rows(self, rows: Tree, axis: int) -> Tree:
        """Return data rows on the device group, spread over its devices; `axis` counts the rows."""
        return self._put(rows, lambda _: cut_rows(axis)) if len(self.devices) > 1 else rows

    def fetch(self, tree: Tree) -> Tree:
        """Return a tree of this device group on the host, each array whole.

        Where the group spans several processes, all of them must call this, in the same order.
        """
        if not self._spans_processes:
            return jax.device_get(tree)
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(x) for batch in _batches(leaves) for x in self._gather(batch)]
        return jax.tree.unflatten(structure, arrays)

    def _put(self, tree: Tree, spec: Callable[[jax.Array], Spec]) -> Tree:
        layout = jax.tree.map(lambda x: self._on(spec(x)), tree)
        if not self._spans_processes:
            return jax.device_put(tree, layout)

        def put(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        return jax.tree.map(put, tree, layout)

    @property
    def _spans_processes(self) -> bool:
        return len({device.process_index for device in self.devices}) > 1

    @cached_property
    def _gather(self) -> Callable[[list[jax.Array]], list[jax.Array]]:
        return jax.jit(lambda leaves: leaves, out_shardings=self._on(Spec()))

    def _on(self, spec: Spec) -> jax.sharding.Sharding:
        return (
            NamedSharding(self._mesh, spec) if self._mesh else SingleDeviceSharding(*self.devices)
        )

    @cached_property
    def _mesh(self) -> Mesh | None:
        if len(self.devices) == 1:
            return None
        return Mesh(np.array(self.devices), AXIS, axis_types=(AxisType.Auto,))


class PlannedGroup(DeviceGroup):
    """A device group without arrays: shapes are laid out as arrays would be."""

    def _put(self, tree: Tree, spec: Callable[[jax.Array], Spec]) -> Tree:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._on(spec(x))), tree
        )


def spread_over_processes(devices: Sequence[jax.Device], parts: int) -> list[jax.Device]:
    """Return the devices of a device group of `parts`, equally many from every process."""
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    share = parts // len(by_process)
    return [device for process in sorted(by_process) for device in by_process[process][:share]]


def device_groups(devices: Sequence[jax.Device], parts: int) -> list[DeviceGroup]:
    """Cut the devices into groups of `parts` each; devices left over stay idle.

    Raises:
      LockstepError: There are fewer devices.
    """
    if len(devices) < parts:
        raise LockstepError(
            f"[peers] fsdp = {parts}, expected at most the {len(devices)} devices here"
        )
    count = len(devices) // parts
    return [DeviceGroup(tuple(devices[n * parts : (n + 1) * parts])) for n in range(count)]


def side_by_side(
    groups: Sequence[DeviceGroup],
    items: Sequence[Item],
    work: Callable[[Item, DeviceGroup], Returned],
) -> list[Returned]:
    """Do `work` for each item on the next free device group, and return the results in their order.

    Each group has a thread.
    """
    free: SimpleQueue[DeviceGroup] = SimpleQueue()
    for group in groups:
        free.put(group)

    def run(item: Item) -> Returned:
        group = free.get()
        try:
            return work(item, group)
        finally:
            free.put(group)

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, items))


def _batches(leaves: Sequence[jax.Array]) -> list[list[jax.Array]]:
    """Return devices' arrays as they are gathered: small ones by one program, each large alone."""
    batches: list[list[jax.Array]] = []
    room = 0
    for leaf in leaves:
        if leaf.nbytes > room:
            batches.append([])
            room = GATHERED_BYTES
        batches[-1].append(leaf)
        room -= leaf.nbytes
    return batches


def cut(shape: tuple[int, ...], parts: int) -> Spec:
    """Return how an array is placed on `parts` devices: cut along the longest axis they divide.

    Of equally long axes the last; whole where they divide none.
    """
    axes = [axis for axis, size in enumerate(shape) if size and size % parts == 0]
    if parts == 1 or not axes:
        return Spec()
    longest = max(axes, key=lambda axis: (shape[axis], axis))
    return Spec(*[None] * longest, AXIS)


def cut_rows(axis: int) -> Spec:
    """Return how rows of data are placed on devices: cut along the axis that counts them."""
    return Spec(*[None] * axis, AXIS)


def keep_cut(tree: Tree, parts: int) -> Tree:
    """Keep arrays inside a program in parts, as `DeviceGroup.put` lays them out."""
    if parts == 1:
        return tree
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:  # not so inside shard_map, which knows its mesh
        mesh = AbstractMesh((parts,), (AXIS,), axis_types=(AxisType.Auto,))

    def keep(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, cut(x.shape, parts)))

    return jax.tree.map(keep, tree)


def on_groups(
    measure: Callable[[Tree, jax.Array], jax.Array], params_on: Mapping[DeviceGroup, Tree]
) -> Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]:
    """Return a function that measures lots of rows on device groups, for `mean_loss`.

    `measure` is `Programs.measure`; each device group that may help has a copy of the params.
    """

    def measured(lots: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        turns = zip(lots, cycle(params_on.items()), strict=False)
        return jax.device_get(
            [measure(params, group.rows(lot, axis=0)) for lot, (group, params) in turns]
        )

    return measured
