"""The state of a run as the coordinator has it, and what follows from it."""

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from lockstep.protocol import committee
from lockstep.protocol.closing import Closing, OnItsWay, slot
from lockstep.protocol.committee import Assignment, Span
from lockstep.protocol.sets import Bloom, ExactSet

if TYPE_CHECKING:
    from lockstep.protocol.consensus import Reports

MAX_PEERS = 256


class RunState(enum.IntEnum):
    """Where a run is, as Psyche names and numbers it."""

    Uninitialized = 0
    WaitingForMembers = 1
    Warmup = 2
    RoundTrain = 3
    RoundWitness = 4
    Cooldown = 5
    Finished = 6
    Paused = 7


class ClientState(enum.IntEnum):
    """What became of a peer in this epoch, as Psyche names and numbers it."""

    Healthy = 0
    Dropped = 1
    Withdrawn = 2
    Ejected = 3


HALTED = (RunState.Uninitialized, RunState.Finished, RunState.Paused)
ACTIVE = (RunState.RoundTrain, RunState.RoundWitness, RunState.Cooldown)


class CoordinatorError(ValueError):
    """An event that the run's state does not allow."""

    def __init__(self, state: "CoordinatorState", event: object, reason: str):
        super().__init__(f"{event} in {state.run_state.name} at step {state.step}: {reason}")


class Settings(Protocol):
    """What the coordinator reads of a run's `[config]`: times in seconds, counts of peers."""

    init_min_clients: int
    min_clients: int
    witness_nodes: int
    verification_percent: int
    total_steps: int
    waiting_for_members_extra_time: float
    warmup_time: float
    round_witness_time: float
    cooldown_time: float
    epoch_time: float | None
    rounds_per_epoch: int | None

    def batch_size(self, tokens: int) -> int:
        """Return the settings' sequences in a batch that begins after `tokens` tokens."""


@dataclass(frozen=True)
class PeerRecord:
    """A member of the current epoch, in the run's state."""

    peer: int
    state: ClientState


@dataclass(frozen=True, kw_only=True)
class CoordinatorState:
    """The state of a run between two events; by default at time 0, without members."""

    settings: Settings  #: The run's `[config]`.
    max_seq_len: int  #: Tokens in a sequence.
    closing: Closing  #: What rounds wait for.
    reports: "Reports"  #: Who says that they ended.
    run_state: RunState = RunState.WaitingForMembers  #: Where the run is.
    since: float = 0.0  #: Time at which it got there, seconds.
    step: int  #: The round being trained, or the next one; the first is 1.
    epoch: int = 0  #: The epoch, from 0.
    data_index: int  #: First sequence that was not assigned in any earlier round.
    height: int = 0  #: Rounds finished in this epoch.
    epoch_start: float = 0.0  #: When this epoch's warm-up began, seconds.
    pending_pause: bool = False  #: Pause when this epoch has cooled down.
    seed: int = 0  #: Seed of this warm-up or round.
    spoken: tuple[int, ...] = ()  #: Witnesses of this warm-up or round that have spoken, in order.
    participants: tuple[Bloom | ExactSet, ...] = ()  #: What each of them sent.
    #: The epoch's members; elections are over positions in this tuple.
    peers: tuple[PeerRecord, ...] = ()
    exited: tuple[PeerRecord, ...] = ()  #: Members that left in this epoch.
    #: Peers that take part from the next epoch on, in the order they came.
    pending: tuple[int, ...] = ()
    #: Proven liars, in the order they were caught; they stay out of the run.
    ejected: tuple[int, ...] = ()
    untrained: tuple[Span, ...] = ()  #: Sequences of earlier rounds that must be assigned again.
    #: Spans that `Untrained` reported for this round; None before the report.
    missed: tuple[Span, ...] | None = None
    #: SHA-256 of the params that ended the epoch, once a member has stored them.
    checkpoint: str | None = None
    checkpointer: int | None = None  #: The first member that did.
    #: Messages of earlier rounds that may still be merged, in this one or later.
    on_their_way: tuple[OnItsWay, ...] = ()
    travel_on: tuple[OnItsWay, ...] = ()  #: Messages of this round that `TravelOn` reported.

    # Elections and the assignment follow from the fields; each is computed once for a state.

    @cached_property
    def healthy_members(self) -> frozenset[int]:
        """The members of this state that nobody has reported as gone."""
        return frozenset(r.peer for r in self.peers if r.state == ClientState.Healthy)

    @cached_property
    def witnesses(self) -> tuple[int, ...]:
        """Who reports on this state's warm-up or round: some members, or a store alone."""
        members = [record.peer for record in self.peers]
        return self.reports.witnesses(members, self.seed, self.settings.witness_nodes)

    @property
    def quorum(self) -> int:
        """How many of this state's witnesses must agree."""
        return committee.witness_quorum(len(self.witnesses))

    @cached_property
    def trainers(self) -> tuple[int, ...]:
        """The members of this state that train this round, in the epoch's order."""
        return tuple(r.peer for i, r in enumerate(self.peers) if i not in self._verifying)

    @cached_property
    def verifiers(self) -> tuple[int, ...]:
        """The members of this state that recompute trainers' steps of this round, in order."""
        return tuple(r.peer for i, r in enumerate(self.peers) if i in self._verifying)

    @cached_property
    def _verifying(self) -> frozenset[int]:
        # Members that leave keep their seats until the round is over, or all others' would move.
        percent = self.settings.verification_percent
        return committee.verifiers(self.seed, len(self.peers), percent)

    @cached_property
    def plan(self) -> Assignment:
        """What this state's round trains: a batch of the ramp's size, spread over trainers."""
        batch_size = self.settings.batch_size(self.data_index * self.max_seq_len)
        return self.closing.assign(self, batch_size)

    @cached_property
    def due(self) -> tuple[OnItsWay, ...]:
        """Messages of earlier rounds that this state's round merges if they arrive in time."""
        return tuple(message for message in self.on_their_way if message not in self.not_due)

    @property
    def not_due(self) -> tuple[OnItsWay, ...]:
        """Messages of earlier rounds whose fragment this state's round does not exchange."""
        age = self.closing.age
        return tuple(m for m in self.on_their_way if age(self.step, m.step) is None)

    def slot_of(self, message: OnItsWay) -> int:
        """Return the slot, in this state's round, of a message that it may merge."""
        age = self.closing.age(self.step, message.step)
        if age is None:
            raise ValueError(f"a message of round {message.step} is not due in round {self.step}")
        return slot(message.peer, age)

    @cached_property
    def spans(self) -> dict[int, Span]:
        """The sequences of each message that this state's round may merge, by slot."""
        return {self.slot_of(message): message.span for message in self.due} | self.plan.spans

    @property
    def deadline(self) -> float | None:
        """Time at which the state `run_state` times out, seconds; None where the run is halted."""
        durations = {
            RunState.WaitingForMembers: self.settings.waiting_for_members_extra_time,
            RunState.Warmup: self.settings.warmup_time,
            RunState.RoundTrain: self.closing.limit,
            RunState.RoundWitness: self.settings.round_witness_time,
            RunState.Cooldown: self.settings.cooldown_time,
        }
        return self.since + durations[self.run_state] if self.run_state in durations else None
