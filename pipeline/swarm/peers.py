"""All peers of a run, on the devices there are: in turns where peers outnumber device groups."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from pipeline import runfile
from pipeline.optim.optimizer import Tree
from pipeline.programs.placement import AXIS, DeviceGroup, cut, cut_sequences, device_groups
from pipeline.programs.train_step import PeerResult, Programs, micro_batches
from pipeline.tokens.sequences import Sequences
from pipeline.transcript.state import State


class Work(NamedTuple):
    """What a peer is to do in a round: int32 rows_MBW, of which `count` are real."""

    rows_MBW: np.ndarray
    count: int


class Done(NamedTuple):
    """What a peer did: its message on the host, and its mean loss before the round."""

    message: Tree
    loss: float


class Peers:
    """The peers' state on devices, and the programs that change it, a round at a time.

    layout "each" dispatches `peer_step` once per peer, on its device group: the program a witness
    replays. "shard_map" and "vmap" are one fused program for all peers, whose bits differ from it.

    Args:
      programs: the run's jitted programs.
      layout: "each", "shard_map" or "vmap".
      state: where to start.
      devices: to spread the peers over.
    """

    def __init__(self, programs: Programs, layout: str, state: State, devices: list[jax.Device]):
        self.programs = programs
        self.count = len(state.own)
        self.parts = programs.parts
        self.groups = device_groups(devices, self.parts)[: 1 if layout == "vmap" else self.count]
        self._step_all = {
            "each": self._step_each,
            "shard_map": self._step_fused,
            "vmap": self._step_fused,
        }[layout]
        self._fused = None if layout == "each" else self._fuse(layout)
        self._spread(state.params, state.shared)
        self._own = self._place_own(state.own)

    def group_of(self, peer: int) -> DeviceGroup:
        """Where a peer runs; peers beyond the number of groups run in turns."""
        if self._fused is None:
            return self.groups[peer % len(self.groups)]
        return self.groups[peer // self._turns]

    def step(
        self, work: dict[int, Work], step: int, programs: Mapping[int, Programs] | None = None
    ) -> dict[int, Done]:
        """Every peer with work takes its step. The others' state stays as it is.

        Args:
          work: by peer.
          step: the round.
          programs: of peers that compute by others than the run's; layout "each" alone can.
        """
        return self._step_all(work, jnp.int32(step), programs or {})

    def own(self, peer: int) -> Tree:
        """A copy on the host of what a peer owns; layout "each"."""
        return jax.tree.map(np.array, self._own[peer])

    def recompute(
        self, cases: Sequence[tuple[int, Tree, Work]], step: int
    ) -> list[tuple[Tree, Tree]]:
        """What a step gives from the states `own`: messages, and states after it, on the host.

        Args:
          cases: who recomputes, from what state, on what work.
          step: the round.
        """
        results = []
        for peer, own, work in cases:
            group = self.group_of(peer)
            results.append(
                self.programs.peer_step(
                    self._params[group],
                    group.put(own),
                    self._shared[group],
                    group.put_sequences(work.rows_MBW),
                    *group.put_whole((np.int32(work.count), np.int32(step))),
                )
            )
        return jax.device_get([(result.message, result.own) for result in results])

    def restart(self, peer: int) -> None:
        """A peer begins with a new state of its own, at the params that the others have."""
        own, _ = self.programs.init(self._params[self.group_of(peer)])
        if self._fused is None:
            self._own[peer] = own
        else:
            self._own = jax.tree.map(lambda rows, row: rows.at[peer].set(row), self._own, own)

    def receive(self, messages: dict[int, Tree], like: Tree, step: int) -> None:
        """All peers apply the messages that the round decided on, absent peers' rows zero."""
        stacked, present_P = stack(messages, like, self.count)
        first = self.groups[0]
        present_P, step = first.put_whole((present_P, np.int32(step)))
        self._spread(
            *self.programs.receive(
                first.put(stacked), present_P, self._params[first], self._shared[first], step
            )
        )

    @property
    def params_on(self) -> dict[DeviceGroup, Tree]:
        """The params, one copy on each group."""
        return self._params

    def state(self) -> State:
        """A copy of the whole state on the host."""
        first = self.groups[0]
        own = self._own if self._fused is None else _unstack(self._own, self.count)
        return jax.tree.map(np.array, State(self._params[first], self._shared[first], tuple(own)))

    def _spread(self, params: Tree, shared: Tree) -> None:
        """One copy of what peers agree on, on each group. Computed once: copies cannot differ."""
        self._params = {group: group.put(params) for group in self.groups}
        self._shared = {group: group.put(shared) for group in self.groups}

    def _step_each(
        self, work: dict[int, Work], step: jax.Array, programs: Mapping[int, Programs]
    ) -> dict[int, Done]:
        results: dict[int, PeerResult] = {}
        latest: dict[DeviceGroup, PeerResult] = {}
        for peer, (rows_MBW, count) in work.items():
            group = self.group_of(peer)
            if group in latest and jax.default_backend() == "cpu":
                # a step that waits for its turn on a CPU holds its memory already
                latest[group].loss.block_until_ready()
            results[peer] = programs.get(peer, self.programs).peer_step(
                self._params[group],
                self._own[peer],
                self._shared[group],
                group.put_sequences(rows_MBW),
                *group.put_whole((np.int32(count), step)),
            )
            self._own[peer], latest[group] = results[peer].own, results[peer]
        # only now wait: until here, the groups worked side by side
        done = jax.device_get({peer: (r.message, r.loss) for peer, r in results.items()})
        return {peer: Done(message, float(loss)) for peer, (message, loss) in done.items()}

    # One fused program for all peers, for many devices.

    def _fuse(self, layout: str) -> jax.stages.Wrapped:
        def step_or_stay(
            params: Tree, shared: Tree, step: jax.Array, peer: tuple[Tree, jax.Array, jax.Array]
        ) -> PeerResult:
            own, rows_MBW, count = peer
            result = self.programs.step_of_a_peer(
                params, own, shared, rows_MBW, jnp.maximum(count, 1), step
            )
            stayed = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), result.own, own)
            return result._replace(own=stayed)

        self._turns = -(-self.count // len(self.groups))
        devices = np.array([group.devices for group in self.groups])
        self._mesh = Mesh(devices, ("peer", AXIS), axis_types=(AxisType.Auto, AxisType.Auto))

        if layout == "vmap":

            def step_all(params: Tree, shared: Tree, step: jax.Array, peers: tuple) -> PeerResult:
                return jax.vmap(partial(step_or_stay, params, shared, step))(peers)

            return jax.jit(step_all)

        def step_shard(params: Tree, shared: Tree, step: jax.Array, peers: tuple) -> PeerResult:
            # in turns, not vmapped: peers of one device share its memory
            return jax.lax.map(partial(step_or_stay, params, shared, step), peers)

        # check_vma would sum each peer's gradient of the replicated params over the peers
        return jax.jit(
            jax.shard_map(
                step_shard,
                mesh=self._mesh,
                in_specs=(Spec(), Spec(), Spec(), Spec("peer")),
                out_specs=Spec("peer"),
                axis_names={"peer"},  # what lies along the other, XLA finds out
                check_vma=False,
            )
        )

    def _place_own(self, own: tuple[Tree, ...]) -> list[Tree] | Tree:
        if self._fused is None:
            return [self.group_of(peer).put(tree) for peer, tree in enumerate(own)]
        rows = [own[min(peer, self.count - 1)] for peer in range(self._rows)]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        return self._put(stacked, lambda row: Spec("peer", *cut(row.shape[1:], self.parts)))

    @property
    def _rows(self) -> int:
        """Peers, and idle ones that fill the last turn."""
        return self._turns * len(self.groups)

    def _step_fused(
        self, work: dict[int, Work], step: jax.Array, programs: Mapping[int, Programs]
    ) -> dict[int, Done]:
        if programs:
            raise ValueError(f"programs of peers {sorted(programs)}, expected none: they are one")
        idle = np.zeros_like(next(iter(work.values())).rows_MBW)
        filled = [work.get(peer, Work(idle, 0)) for peer in range(self._rows)]
        rows = np.stack([w.rows_MBW for w in filled])
        counts = np.array([w.count for w in filled], np.int32)
        first = self.groups[0]
        params, shared, step = self._put(
            (self._params[first], self._shared[first], step), lambda x: cut(x.shape, self.parts)
        )
        rows = self._put(rows, lambda rows: Spec("peer", *cut_sequences(rows.ndim - 1)))
        counts = self._put(counts, lambda _: Spec("peer"))
        result = self._fused(params, shared, step, (self._own, rows, counts))
        self._own = result.own
        messages = _unstack(jax.device_get(result.message), self._rows)
        losses = jax.device_get(result.loss)
        return {peer: Done(messages[peer], float(losses[peer])) for peer in work}

    def _put(self, tree: Tree, spec: Callable[[jax.Array], Spec]) -> Tree:
        """Arrays on all groups, each as its spec says."""
        return jax.device_put(
            tree, jax.tree.map(lambda x: NamedSharding(self._mesh, spec(x)), tree)
        )


def _unstack(tree: Tree, count: int) -> list[Tree]:
    return [jax.tree.map(lambda leaf, row=row: leaf[row], tree) for row in range(count)]


def stack(messages: dict[int, Tree], like: Tree, count: int) -> tuple[Tree, np.ndarray]:
    """Messages as one tree with a leading axis [peer], absent rows zero; and `present_P`."""
    absent = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    rows = [messages.get(peer, absent) for peer in range(count)]
    present_P = np.array([peer in messages for peer in range(count)])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows), present_P


def assigned(data: Sequences, span: tuple[int, int], run: runfile.Run, trainers: int) -> Work:
    """What a peer trains on that is assigned the sequences of `span`, first and last included.

    Args:
      data: the run's.
      span: first and last sequence.
      run: the run.
      trainers: how many peers train in the round, which decides the shape.
    """
    rows_NW = data.take(np.arange(span[0], span[1] + 1))
    most = capacity(run, trainers)
    return Work(micro_batches(rows_NW, most, run.peers.micro_batch), len(rows_NW))


def capacity(run: runfile.Run, trainers: int) -> int:
    """The most sequences that one of so many trainers is assigned in any round.

    With the batch ramp it stays, so that nothing is compiled anew; with the trainers it changes.
    """
    return -(-run.config.global_batch_size_end // trainers)
