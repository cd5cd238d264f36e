"""Simulated peers whose steps are one fused program: layouts "shard_map" and "vmap".

Fast on many devices; its bits differ from those of `peer_step`, so an audit compares distances.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lockstep.optim.optimizer import Tree
from lockstep.programs.local_steps import Work
from lockstep.programs.placement import AXIS, DeviceGroup, cut, cut_rows
from lockstep.programs.train_step import PeerResult, Programs
from lockstep.swarm.peers import Done, M, RoundSteps, SimulatedPeers
from lockstep.transcript.state import State


class FusedPeers(SimulatedPeers):
    """Peers as rows of an axis: spread over devices by shard_map, or vmapped on one group."""

    def __init__(
        self,
        programs: Programs,
        layout: str,
        state: State,
        devices: Sequence[jax.Device],
        absent: Iterable[int] = (),
    ):
        self.layout, self.parts = layout, programs.parts
        super().__init__(programs, state, devices, absent)
        self._step_all = self._fuse()

    def group_of(self, peer: int) -> DeviceGroup:
        """Return where a peer runs: neighbours share a group."""
        return self.groups[peer // self._turns]

    def step(self, asked: RoundSteps[M]) -> dict[int, Done[M]]:
        """Take the step of every peer that has work, as `SimulatedPeers.step`.

        Raises:
          ValueError: A peer is to compute in another precision, or to commit to its state, which
            no other peer could recompute.
        """
        if asked.hashed:
            raise ValueError("peers of one program are hashed, expected none that verify")
        if asked.imprecise:
            raise ValueError(f"peers {sorted(asked.imprecise)} are imprecise, expected one program")
        work = asked.work
        idle = jax.tree.map(np.zeros_like, next(iter(work.values())).rows_MB)
        filled = [work.get(peer, Work(idle, 0)) for peer in range(self._rows)]
        agreed = (self._first.params, self._first.shared, jnp.int32(asked.number))
        params, shared, step = self._put(agreed, lambda x: cut(x.shape, self.parts))
        rows = jax.tree.map(lambda *peers: np.stack(peers), *(w.rows_MB for w in filled))
        rows = self._put(rows, lambda _: Spec("peer", *cut_rows(1)))
        counts = np.array([w.count for w in filled], np.int32)
        counts = self._put(counts, lambda _: Spec("peer"))
        result = self._step_all(params, shared, step, (self._own, rows, counts))
        self._own = result.own
        messages = _unstack(jax.device_get(result.message), self._rows)
        losses = jax.device_get(result.loss)
        return {p: Done(asked.pack(messages[p], p), float(losses[p])) for p in work}

    def sit_out(self, idle: Set[int], step: int) -> None:
        """Do nothing: the fused program has done it for peers without work."""

    def own(self, peer: int) -> Tree:
        """Return a copy on the host of what a peer owns."""
        return jax.tree.map(lambda rows: np.array(rows[peer]), self._own)

    def restart(self, peer: int) -> None:
        """Give a peer a new state of its own, at the params that the others have."""
        own = self._replica_of(peer).new_own()
        self._own = jax.tree.map(lambda rows, row: rows.at[peer].set(row), self._own, own)

    @property
    def _turns(self) -> int:
        """Return the peers of one device group."""
        return -(-self.count // len(self.groups))

    @property
    def _rows(self) -> int:
        """Return peers, with idle ones that fill the last turn."""
        return self._turns * len(self.groups)

    def _choose(self, groups: list[DeviceGroup]) -> list[DeviceGroup]:
        return groups[: 1 if self.layout == "vmap" else self.count]

    def _put_own(self, own: Sequence[Tree]) -> Tree:
        rows = [own[min(peer, self.count - 1)] for peer in range(self._rows)]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        return self._put(stacked, lambda row: Spec("peer", *cut(row.shape[1:], self.parts)))

    def _own_by_peer(self) -> list[Tree]:
        return _unstack(self._own, self.count)

    @property
    def _mesh(self) -> Mesh:
        devices = np.array([group.devices for group in self.groups])
        return Mesh(devices, ("peer", AXIS), axis_types=(AxisType.Auto, AxisType.Auto))

    def _put(self, tree: Tree, spec: Callable[[jax.Array], Spec]) -> Tree:
        """Put arrays on all groups, each by its spec."""
        mesh = self._mesh
        return jax.device_put(tree, jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree))

    def _fuse(self) -> jax.stages.Wrapped:
        """Return the program of all peers: (params, shared, step, (own, rows, counts))."""

        def step_or_stay(
            params: Tree, shared: Tree, step: jax.Array, peer: tuple[Tree, jax.Array, jax.Array]
        ) -> PeerResult:
            own, rows_MB, count = peer
            result = self.programs.step_of_a_peer(
                params, own, shared, rows_MB, jnp.maximum(count, 1), step
            )
            idle = self.programs.align_a_peer(own, params, step)
            stayed = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), result.own, idle)
            return result._replace(own=stayed)

        def step_vmapped(params: Tree, shared: Tree, step: jax.Array, peers: tuple) -> PeerResult:
            return jax.vmap(partial(step_or_stay, params, shared, step))(peers)

        def step_shard(params: Tree, shared: Tree, step: jax.Array, peers: tuple) -> PeerResult:
            # in turns, not vmapped: peers of one device share its memory
            return jax.lax.map(partial(step_or_stay, params, shared, step), peers)

        if self.layout == "vmap":
            return jax.jit(step_vmapped)
        # check_vma would sum each peer's gradient of the replicated params over the peers
        return jax.jit(
            jax.shard_map(
                step_shard,
                mesh=self._mesh,
                in_specs=(Spec(), Spec(), Spec(), Spec("peer")),
                out_specs=Spec("peer"),
                axis_names={"peer"},  # XLA finds out what lies along the other
                check_vma=False,
            )
        )


def make_peers(
    programs: Programs,
    layout: str,
    state: State,
    devices: Sequence[jax.Device],
    absent: Iterable[int] = (),
) -> SimulatedPeers:
    """Return a run's peers, for `[peers] layout`; `absent` when `state` was saved."""
    if layout == "each":
        return SimulatedPeers(programs, state, devices, absent)
    return FusedPeers(programs, layout, state, devices, absent)


def _unstack(tree: Tree, count: int) -> list[Tree]:
    return [jax.tree.map(lambda leaf, row=row: leaf[row], tree) for row in range(count)]
