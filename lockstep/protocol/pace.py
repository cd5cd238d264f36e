"""When rounds close without late messages: Decoupled DiLoCo's quorum, grace and ages.

A round closes a grace after its K-th message, instead of when all have arrived. A message that is
late travels on, and is merged, with its age, when a later round exchanges its fragment of the
params. Its peer does not wait: it trains on in each round, and its next message counts from where
it is. So a round may merge several messages of a peer, of several ages, each in a `slot` of its
own. Slower peers (`[links]`) get fewer local steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.protocol.committee import Span

ROUNDING = 1e-9  # a quotient of speeds this close below a whole number counts as that number
AGE = 10_000  # slots of messages of one age, more than there are peers


def slot(peer: int, age: int) -> int:
    """Return the number of a message in a round: its peer's for one of the round, of age 0."""
    return age * AGE + peer


def sender(slot: int) -> int:
    """Return the peer that sent the message in a slot."""
    return slot % AGE


def age_of(slot: int) -> int:
    """Return the age of the message in a slot, in versions of its fragment."""
    return slot // AGE


@dataclass(frozen=True)
class OnItsWay:
    """A message that had not arrived when its round was over, and may be merged in a later one."""

    peer: int  #: Its sender.
    step: int  #: The round in which it was computed.
    span: Span  #: First and last sequence that its peer was assigned in it.
    commitment: str  #: Commitment to the message, hex.
    at: float  #: When it is at every peer, seconds since the start of the run.


@dataclass(frozen=True)
class Pace:
    """How a run's rounds go on, the same in all of them."""

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
    steps: tuple[int, ...]  #: Local steps of each peer in a round, by peer.
    #: Sequences of a round in which peers take these steps; in smaller rounds of a batch ramp they
    #: take fewer, in proportion.
    batch: int
    #: Every so many rounds, and in the last one, a round waits for all messages, and none travels
    #: on from it, so that a snapshot after it is the whole state. 0 for never.
    settle_every: int
    last: int  #: The last round.

    def share(self, peer: int, batch: int) -> int:
        """Return how many sequences a peer gets in a round of `batch` sequences.

        rows * max(1, floor(steps * batch / the largest batch))
        """
        return self.rows * max(1, self.steps[peer] * batch // self.batch)

    def settles(self, step: int) -> bool:
        """Return whether nothing travels on from a round."""
        every = self.settle_every
        return every > 0 and (step % every == 0 or step == self.last)

    def travels_on(self, step: int) -> bool:
        """Return whether a late message of this round may be merged at its fragment's next turn.

        It may not if a round that settles comes first.
        """
        every, turn = self.settle_every, step + self.fragments
        if not every:
            return True
        return not self.settles(step) and turn <= min((step // every + 1) * every, self.last)

    def closes(self, step: int, arrivals: Iterable[float], awaited: int, limit: float) -> float:
        """Return the seconds after its start at which round `step` closes, at most `limit`.

        `arrivals` are those of its messages, without lost ones, of `awaited` that could arrive.
        """
        times, quorum = sorted(arrivals), min(self.quorum, awaited)
        if self.settles(step) or not 0 < quorum <= len(times):
            return limit
        return min(limit, times[quorum - 1] + self.grace_seconds)


def steps_of(speeds: Sequence[float], steps: int) -> tuple[int, ...]:
    """Return how many local steps each peer takes in a round, by its tokens per second.

    max(1, floor(steps * speed / the fastest peer's))
    """
    fastest = max(speeds)
    return tuple(max(1, int(steps * speed / fastest + ROUNDING)) for speed in speeds)
