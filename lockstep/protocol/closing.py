"""What a round waits for: when it closes, which late messages count later, who trains how much.

All of it is decided here. The coordinator, training, audits and plans hold a run's `Closing`, and
ask it; another way to close a round is another class, and the method or run file that chooses it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lockstep.protocol import committee
from lockstep.protocol.committee import Assignment, Span

if TYPE_CHECKING:
    from lockstep.protocol.round import Evidence, Round
    from lockstep.protocol.run_state import CoordinatorState

ROUNDING = 1e-9  # a quotient of speeds this close below a whole number counts as that number
SLOTS_OF_AN_AGE = 10_000  # slots of messages of one age, more than there are peers


def slot(peer: int, age: int) -> int:
    """Return the slot of a message in a round that closes: its peer's number for one of age 0."""
    return age * SLOTS_OF_AN_AGE + peer


def sender(slot: int) -> int:
    """Return the peer that sent the message in a slot, late or not."""
    return slot % SLOTS_OF_AN_AGE


def age_of(slot: int) -> int:
    """Return the age of the message in a slot, in versions of its fragment: 0 if it is not late."""
    return slot // SLOTS_OF_AN_AGE


@dataclass(frozen=True)
class OnItsWay:
    """A late message: not there when its round closed, it may be merged in a later one."""

    peer: int  #: Its sender.
    step: int  #: The round in which it was computed.
    span: Span  #: First and last sequence that its peer was assigned in it.
    commitment: str  #: Commitment to the message, hex.
    at: float  #: When it is at every peer, seconds since the start of the run.


@dataclass(frozen=True, kw_only=True)
class Closing:
    """A round waits for all messages, up to a limit, and what is late then does not count.

    So where nobody can fail, lie or be late, what is merged is known before anybody has trained.
    """

    #: Whether a round waits for all messages, and peers for its end, as long as the limit allows.
    waits_for_all: ClassVar[bool] = True

    limit: float  #: Seconds after its start at which a round closes in any case.
    most_rows: int  #: Rows of the largest round, over all peers.
    each: int | None = None  #: Rows of each trainer, however many there are; None: they share.
    #: The fewest trainers for whom steps have room, where peers come and go in any round and no
    #: time is left to compile a step of another shape; padding takes none. None: as many as train.
    fewest: int | None = None

    def closes(self, round_: "Round", evidence: "Evidence") -> float:
        """Return the seconds after its start at which a round closes if not all is there before."""
        return self.limit

    def usual(self, arrivals: Collection[float]) -> float:
        """Return about when a round closes, in seconds, whose messages arrive at these times."""
        return min(max(arrivals), self.limit)

    def travels_on(self, step: int, age: int) -> bool:
        """Return whether a message of this age that is late in round `step` may count later."""
        return False

    def age(self, step: int, since: int) -> int | None:
        """Return a late message's age, of round `since` in round `step`, in versions of its params.

        None: the round exchanges other params.
        """
        return step - since

    def share(self, peer: int, batch: int, trainers: int) -> float:
        """Return a peer's rows of a batch where all are awaited: those of `trainers` on average."""
        return batch / trainers

    def assign(self, state: "CoordinatorState", batch: int) -> Assignment:
        """Return what each trainer gets of a batch in a round that waits for all."""
        batch = self.each * len(state.trainers) if self.each else batch
        return committee.plan(state.trainers, state.seed, state.data_index, batch, state.untrained)

    def capacity(self, trainers: int) -> int:
        """Return the most rows that one of `trainers` peers is assigned, if all are awaited."""
        return self.each or -(-self.most_rows // min(trainers, self.fewest or trainers))


@dataclass(frozen=True, kw_only=True)
class QuorumClosing(Closing):
    """A round closes a grace after its K-th message: Decoupled DiLoCo's quorum, grace and ages.

    A message that is late travels on, and is merged, with its age, when a later round exchanges its
    fragment of the params. Its peer does not wait: it trains on in each round, and its next message
    counts from where it is. So a round may merge several messages of a peer, of several ages, each
    in a `slot` of its own. Slower peers (`[links]`) get fewer local steps.
    """

    waits_for_all = False

    #: How many of its own messages a round waits for before it starts to close, K. Older messages
    #: do not count: one that has arrived already would close the round before anybody has trained.
    quorum: int
    #: How long it waits for others then. A message does not count as arrived before its sender has
    #: trained the steps beside which it travels (`links.arrivals`), so the others have that long
    #: anyway: the paper's adaptive window, gamma * slack, with gamma 1.
    grace_seconds: float
    #: The oldest age, in versions of its fragment, at which a message is still merged.
    max_age: int
    fragments: int  #: Fragments of the params; each round exchanges one, in turn.
    rows: int  #: Sequences of a local step.
    #: Local steps of each peer in a largest round, by peer. In smaller rounds of a batch ramp they
    #: take fewer, in proportion.
    steps: tuple[int, ...]
    #: Every so many rounds, and in the last one, a round waits for all messages, and none travels
    #: on from it, so that a snapshot after it is the whole state. 0 for never.
    settle_every: int
    last: int  #: The last round.

    def closes(self, round_: "Round", evidence: "Evidence") -> float:
        """Return the seconds after its start at which a round closes, at most `limit`.

        Messages that could not arrive do not change K, unless fewer than K are assigned any work.
        """
        if self._settles(round_.step):
            return self.limit
        return self._after_quorum(evidence.arrivals.values(), len(round_.assignment))

    def usual(self, arrivals: Collection[float]) -> float:
        """Return about when a quorum closes a round, in seconds, as `Closing.usual` does."""
        return min(max(arrivals), self._after_quorum(arrivals, len(arrivals)))

    def _after_quorum(self, arrivals: Collection[float], awaited: int) -> float:
        times, quorum = sorted(arrivals), min(self.quorum, awaited)
        if not 0 < quorum <= len(times):
            return self.limit
        return min(self.limit, times[quorum - 1] + self.grace_seconds)

    def _settles(self, step: int) -> bool:
        """Return whether nothing travels on from a round that a quorum closes."""
        every = self.settle_every
        return every > 0 and (step % every == 0 or step == self.last)

    def travels_on(self, step: int, age: int) -> bool:
        """Return whether a late message may be merged at its fragment's next turn.

        It may not if a round that settles comes first.
        """
        every, turn = self.settle_every, step + self.fragments
        if age >= self.max_age or self._settles(step):
            return False
        return not every or turn <= min((step // every + 1) * every, self.last)

    def age(self, step: int, since: int) -> int | None:
        """Return a late message's age in versions of its fragment; None in others' turns."""
        versions, other = divmod(step - since, self.fragments)
        return None if other else versions

    def share(self, peer: int, batch: int, trainers: int) -> int:
        """Return how many sequences of a batch a peer gets whose round a quorum closes.

        rows * max(1, floor(steps * batch / the largest batch))
        """
        return self.rows * max(1, self.steps[peer] * int(batch) // self.most_rows)

    def assign(self, state: "CoordinatorState", batch: int) -> Assignment:
        """Return what each trainer gets in a round that a quorum closes: its share."""
        shares = {peer: self.share(peer, batch, len(state.trainers)) for peer in state.trainers}
        return committee.plan_shares(shares, state.seed, state.data_index, state.untrained)

    def capacity(self, trainers: int) -> int:
        """Return the most rows that a peer is assigned where a quorum closes rounds."""
        return self.rows * max(self.steps)


def steps_of(speeds: Sequence[float], steps: int) -> tuple[int, ...]:
    """Return how many local steps each peer takes before a round closes, by its tokens per second.

    max(1, floor(steps * speed / the fastest peer's))
    """
    fastest = max(speeds)
    return tuple(max(1, int(steps * speed / fastest + ROUNDING)) for speed in speeds)
