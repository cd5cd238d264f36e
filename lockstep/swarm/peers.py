"""Peers as a round sees them, and those simulated on this machine.

Simulated peers take turns if they outnumber device groups. Fused ones, of layouts "shard_map" and
"vmap", step in one program: fast on many devices, but as compiled its bits may differ from those of
`peer_step`, so that no audit compares them.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lockstep.errors import StepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.local_training import Work
from lockstep.programs.placement import AXIS, DeviceGroup, cut, cut_rows, device_groups, on_groups
from lockstep.programs.replica import Replica, RoundMerge
from lockstep.programs.train_step import PeerResult, Programs
from lockstep.protocol.driver import RoundSettings
from lockstep.transcript.state import State
from lockstep.transcript.trees import tree_hash
from lockstep.wire.facts import MessageFacts

log = logging.getLogger(__name__)
M = TypeVar("M")


class Rows(Protocol):
    """The rows of a run's data, or some of them: `Sequences`, or those that a bundle holds."""

    def take(self, indices_N: np.ndarray) -> Tree:
        """Return the rows at these indices that peers train on, in the run's order."""


def work_of(
    settings: RoundSettings, programs: Programs, data: Rows, span: tuple[int, int], trainers: int
) -> Work:
    """Return the work of a peer of the swarm that is assigned the rows of `span`, first to last.

    Its shape follows from how many `trainers` there are in the round.
    """
    rows_N = data.take(np.arange(span[0], span[1] + 1))
    return programs.work(rows_N, settings.closing.capacity(trainers), settings.micro_batch)


def to_host(message: Tree, peer: int) -> Tree:
    """Return a peer's message on the host; the default `RoundSteps.pack`."""
    return jax.device_get(message)


class RoundSteps(NamedTuple, Generic[M]):
    """The steps that a round asks its peers for."""

    work: Mapping[int, Work]  # work by peer; the others take no step
    number: int  # the round, from 1
    # peers that compute by other programs than the run's, and which: `Programs.broken`
    broken: Mapping[int, int] = MappingProxyType({})
    # whether peers commit to what they own after the step, and hold what they owned before it,
    # since some of them are to show it (`RunningPeers.before`)
    hashed: bool = False
    # called with each message, on the host or on a device where it may still be in the making, and
    # its peer, while others may be at their steps: pack(message, peer). Nothing else refers to it.
    pack: Callable[[Tree, int], M] = to_host


class StepResult(NamedTuple, Generic[M]):
    """What a peer's step came to; its message is what `RoundSteps.pack` makes of it."""

    message: M  # by default its arrays on the host; in a training `Packed`
    # its mean loss before the round, nats per token; of a step that may not be over, on its device
    loss: float | jax.Array
    state: str | None = None  # hash of what it owns after its step, if `hashed`
    seconds: float = 0.0  # real time until its message was ready; 0 if peers take turns


class RunningPeers(Protocol):
    """The peers of a run, in this process or each in its own."""

    programs: Programs
    count: int  # how many peers the run has
    absent: frozenset[int]  # peers whose process is gone, or whose state is

    @property
    def living(self) -> frozenset[int]:
        """The run's peers that this process trains; of others it has their messages alone."""

    def where(self, peer: int) -> str:
        """Return where a peer runs, for the log."""

    def returned(self) -> tuple[int, ...]:
        """Return the run's absent peers that are back and can join."""

    def await_return(self) -> tuple[int, ...]:
        """Wait until an absent peer is back, and return what `returned` does.

        It returns no peer where none can be expected to return.
        """

    def part(self, members: Set[int]) -> tuple[int, ...]:
        """Release the peers that asked to leave, and return them."""

    def step(self, steps: RoundSteps[M]) -> dict[int, StepResult[M]]:
        """Take the step of every peer that has work; a peer that is lost meanwhile is absent."""

    def sit_out(self, idle: Set[int], step: int) -> None:
        """Have present peers that take no step in a round adopt the last round's commit."""

    def own(self, peer: int) -> Tree:
        """Return a copy on the host of what a peer of the run owns."""

    def before(self, peer: int) -> Tree | None:
        """Return a copy of what a peer owned before its last step, which was `hashed`.

        None where the peer does not show it: it is lost.
        """

    def recompute(
        self, cases: Sequence[tuple[int, Tree, Work]], step: int
    ) -> list[tuple[Tree, str]]:
        """Return the message and the state hash of each step: (peer, state before it, its work)."""

    def distrust(self, peer: int, why: str) -> None:
        """Drop a misbehaving peer: it is absent until it joins again or is taken back."""

    def join(self, peer: int) -> None:
        """Have a peer of the run take over what the others agree on, with a new own state."""

    def take_back(self, members: Set[int]) -> None:
        """Let peers that were silent, and are back, continue from their new state."""

    def restart(self, peer: int) -> None:
        """Give a peer that was silent a new state of its own, at the others' params."""

    def receive(self, merge: RoundMerge) -> None:
        """Apply, for all peers, the messages that the round decided on."""

    def facts(
        self, results: Mapping[int, StepResult[Tree]], ahead: RoundMerge | None
    ) -> dict[int, MessageFacts]:
        """Return the facts of a round's messages that lie on devices here.

        Before it waits for them it begins with the merge `ahead`, if it is given: the decision will
        most likely ask for that, and devices need not wait for it.
        """

    def measure(self, lots: Sequence[Tree]) -> list[np.ndarray]:
        """Return the task's measure of each lot of rows, at the peers' agreed params."""

    def params_hash(self) -> str:
        """Return the hash of the params on which the peers agree."""

    def params(self) -> Tree:
        """Return a copy on the host of the params on which the peers agree."""

    def state(self) -> State:
        """Return a copy on the host of all peers' state."""

    def close(self) -> None:
        """Release the peers' processes, if they have any."""


class SimulatedPeers:
    """Peers in this process: their state on devices, and the programs that change it.

    `peer_step` is dispatched once for each peer on its device group (`layout = "each"`): the
    program that an audit replays. `absent` peers were so when `state` was saved.
    """

    def __init__(
        self,
        programs: Programs,
        state: State,
        devices: Sequence[jax.Device],
        absent: Iterable[int] = (),
    ):
        self.programs, self.absent = programs, frozenset(absent)
        self.count = len(state.own)
        self._living = frozenset(p for p, own in enumerate(state.own) if own is not None)
        self.groups = self._choose(device_groups(devices, programs.parts))
        self.agree(state.params, state.shared)
        self._own = self._put_own(state.own)
        self._before: dict[int, Tree] = {}

    @property
    def living(self) -> frozenset[int]:
        return self._living

    def group_of(self, peer: int) -> DeviceGroup:
        """Return where a peer runs; peers beyond the number of device groups run in turns."""
        return self.groups[peer % len(self.groups)]

    def where(self, peer: int) -> str:
        return str(self.group_of(peer))

    def returned(self) -> tuple[int, ...]:
        return tuple(sorted(self.absent))  # nobody has a process that could be gone

    def await_return(self) -> tuple[int, ...]:
        return self.returned()

    def part(self, members: Set[int]) -> tuple[int, ...]:
        return ()

    def distrust(self, peer: int, why: str) -> None:
        log.info(f"train: peer {peer} is lost: {why}")
        self.absent |= {peer}

    def close(self) -> None:
        pass

    def step(self, steps: RoundSteps[M]) -> dict[int, StepResult[M]]:
        # a step that waits for its turn on a CPU holds its memory already, as a large message does
        one_by_one = jax.default_backend() == "cpu" or self.programs.large(self.count)
        results: dict[int, tuple[Tree, jax.Array]] = {}
        latest: dict[DeviceGroup, int] = {}
        done: dict[int, StepResult[M]] = {}
        failed: dict[int, StepError] = {}
        self._before = {peer: self.own(peer) for peer in steps.work} if steps.hashed else {}
        for peer, work in steps.work.items():
            programs = self.programs.broken(steps.broken.get(peer))
            replica = replace(self._replica_of(peer), programs=programs)
            if one_by_one and (previous := latest.pop(replica.group, None)) is not None:
                done[previous] = _step_result(results.pop(previous), previous, steps)
                jax.block_until_ready(done[previous].loss)
            try:
                result = replica.step(self._own[peer], work, steps.number)
            except StepError as error:  # its process failed, not this one
                failed[peer] = error
                continue
            results[peer], latest[replica.group] = (result.message, result.loss), peer
            self._own[peer] = result.own
            del result
        self._lose(failed, steps)
        # only now, when all steps are dispatched: to pack may wait, and groups work side by side
        done |= {peer: _step_result(results.pop(peer), peer, steps) for peer in list(results)}
        return {
            peer: outcome._replace(state=tree_hash(self.own(peer))) if steps.hashed else outcome
            for peer, outcome in ((peer, done[peer]) for peer in steps.work if peer in done)
        }

    def sit_out(self, idle: Set[int], step: int) -> None:
        for peer in sorted(idle):
            self._own[peer] = self._replica_of(peer).align(self._own[peer], step)

    def own(self, peer: int) -> Tree:
        return jax.tree.map(np.array, self._own[peer])

    def before(self, peer: int) -> Tree | None:
        return self._before[peer]  # in this process nobody can withhold it

    def recompute(
        self, cases: Sequence[tuple[int, Tree, Work]], step: int
    ) -> list[tuple[Tree, str]]:
        replicas = [(self._replica_of(peer), own, work) for peer, own, work in cases]
        results = [replica.step(replica.group.put(own), w, step) for replica, own, w in replicas]
        results = jax.device_get([(result.message, result.own) for result in results])
        return [(message, tree_hash(own)) for message, own in results]

    def join(self, peer: int) -> None:
        self.absent -= {peer}  # in this process it has the agreed params already
        self.restart(peer)

    def take_back(self, members: Set[int]) -> None:
        self.absent -= members

    def restart(self, peer: int) -> None:
        self._own[peer] = self._replica_of(peer).new_own()

    def receive(self, merge: RoundMerge) -> None:
        begun, after = self._ahead or (None, None)
        if begun is None or not begun.is_same(merge):
            self._ahead = after = None  # which has memory that the merge takes
            after = self._first.receive(merge, self.count)
        self._spread(after)

    def facts(
        self, results: Mapping[int, StepResult[Tree]], ahead: RoundMerge | None
    ) -> dict[int, MessageFacts]:
        if not results:
            return {}
        first, nothing = self._first, StepResult(None, np.float32(0))
        of_all = [results.get(peer, nothing) for peer in range(self.count)]
        stacked, losses = first.stacked([one.message for one in of_all]), [x.loss for x in of_all]
        if len(self.groups) > 1:
            losses = first.group.put(losses)
        facts = self.programs.facts(stacked, losses)
        if ahead:
            self._ahead = ahead, first.receive(ahead, self.count, stacked)
        of_each = [*map(MessageFacts, *jax.device_get(facts))]
        return {peer: of_each[peer] for peer in results}

    def params_and_shared(self) -> tuple[Tree, Tree]:
        """Return what all simulated peers agree on, on the first device group."""
        return self._first.params, self._first.shared

    def agree(self, params: Tree, shared: Tree) -> None:
        """Have all simulated peers agree on these params and on this shared state."""
        self._spread(Replica.put(self.programs, self.groups[0], params, shared))

    def measure(self, lots: Sequence[Tree]) -> list[np.ndarray]:
        return on_groups(self.programs.steps.measure, self.params_on)(lots)

    def params_hash(self) -> str:
        return tree_hash(jax.device_get(self._first.params))

    def params(self) -> Tree:
        return jax.tree.map(np.array, self._first.params)

    @property
    def params_on(self) -> dict[DeviceGroup, Tree]:
        """The simulated peers' params, one copy on each device group."""
        return {group: replica.params for group, replica in self._replicas.items()}

    def state(self) -> State:
        own = tuple(self._own_by_peer())
        return jax.tree.map(np.array, State(self._first.params, self._first.shared, own))

    def _lose(self, failed: Mapping[int, StepError], steps: RoundSteps) -> None:
        """Drop peers whose workload failed; if it failed for all, raise: no peer is to blame."""
        if failed and failed.keys() == steps.work.keys():
            raise next(iter(failed.values()))
        for peer, error in failed.items():
            self.distrust(peer, str(error))

    @property
    def _first(self) -> Replica:
        return self._replicas[self.groups[0]]

    def _replica_of(self, peer: int) -> Replica:
        return self._replicas[self.group_of(peer)]

    def _spread(self, first: Replica) -> None:
        """Take over the peers' state of the first group, with a copy on each other group."""
        agreed = first.params, first.shared
        copies = {group: Replica.put(self.programs, group, *agreed) for group in self.groups[1:]}
        self._replicas = {first.group: first} | copies
        self._ahead: tuple[RoundMerge, Replica] | None = None

    # What a fused layout does differently

    def _choose(self, groups: list[DeviceGroup]) -> list[DeviceGroup]:
        return groups[: self.count]

    def _put_own(self, own: Sequence[Tree | None]) -> list[Tree | None]:
        return [
            None if tree is None else self.group_of(peer).put(tree) for peer, tree in enumerate(own)
        ]

    def _own_by_peer(self) -> list[Tree]:
        return self._own


def _step_result(result: tuple[Tree, jax.Array], peer: int, steps: RoundSteps[M]) -> StepResult[M]:
    """Pack the message of a peer's step, and return its result."""
    message, loss = result
    return StepResult(steps.pack(message, peer), loss)


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
        self._apart = jax.jit(partial(_unstack, count=self._rows))

    def group_of(self, peer: int) -> DeviceGroup:
        """Return where a fused peer runs: neighbours share a device group."""
        return self.groups[peer // self._turns]

    def step(self, steps: RoundSteps[M]) -> dict[int, StepResult[M]]:
        # such a run has neither verifiers nor peers of another precision: see `misfits.py`
        work = steps.work
        idle = jax.tree.map(np.zeros_like, next(iter(work.values())).rows_MB)
        works = [work.get(peer, Work(idle, 0)) for peer in range(self._rows)]
        agreed = (self._first.params, self._first.shared, jnp.int32(steps.number))
        params, shared, step = self._put(agreed, lambda x: cut(x.shape, self.parts))
        rows = jax.tree.map(lambda *peers: np.stack(peers), *(w.rows_MB for w in works))
        rows = self._put(rows, lambda _: Spec("peer", *cut_rows(1)))
        counts = np.array([w.count for w in works], np.int32)
        counts = self._put(counts, lambda _: Spec("peer"))
        result = self._step_all(params, shared, step, (self._own, rows, counts))
        self._own = result.own
        rows = self._apart(self.groups[0].put((result.message, result.loss)))
        return {p: _step_result(rows[p], p, steps) for p in work}

    def sit_out(self, idle: Set[int], step: int) -> None:
        pass  # the fused program has done it

    def own(self, peer: int) -> Tree:
        return jax.tree.map(lambda rows: np.array(rows[peer]), self._own)

    def restart(self, peer: int) -> None:
        own = self._replica_of(peer).new_own()
        self._own = jax.tree.map(lambda rows, row: rows.at[peer].set(row), self._own, own)

    @property
    def _turns(self) -> int:
        """Return the number of fused peers of one device group."""
        return -(-self.count // len(self.groups))

    @property
    def _rows(self) -> int:
        """Return the number of fused peers, with idle ones that fill the last turn."""
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
        """Put arrays on all device groups of fused peers, each by its spec."""
        mesh = self._mesh
        return jax.device_put(tree, jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree))

    def _fuse(self) -> jax.stages.Wrapped:
        """Return the program of all peers fused: (params, shared, step, (own, rows, counts))."""

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

        def step_all(params: Tree, shared: Tree, step: jax.Array, peers: tuple) -> PeerResult:
            of_each = partial(step_or_stay, params, shared, step)
            # in turns, not vmapped, where peers of one device share its memory
            return jax.vmap(of_each)(peers) if is_one else jax.lax.map(of_each, peers)

        if is_one := self.layout == "vmap":
            return jax.jit(step_all)
        # check_vma would sum each peer's gradient of the replicated params over the peers
        return jax.jit(
            jax.shard_map(
                step_all,
                mesh=self._mesh,
                in_specs=(Spec(), Spec(), Spec(), Spec("peer")),
                out_specs=Spec("peer"),
                axis_names={"peer"},  # XLA infers what lies along the other
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
