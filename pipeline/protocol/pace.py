"""How rounds go on without those that are late: Decoupled DiLoCo's quorum, grace and ages.

A round closes at its K-th arrival and a grace after it, instead of when all have arrived. A message
that is not there by then travels on, and is merged in a later round, with its age; meanwhile its
peer is given no other work. Peers that are slower by `[links]` are given fewer local steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.protocol.committee import Span
from pipeline.protocol.dispute import Hash

ROUNDING = 1e-9  # of a quotient of speeds, which floor would take for the step below


@dataclass(frozen=True)
class Travelling:
    """A message of an earlier round that had not arrived when that round was over.

    Attributes:
      step: The round in which it was computed.
      span: First and last sequence that its peer was assigned in it.
      commitment: Commitment to the message, hex.
      seconds: When it is at every peer: in a `Round`, after the round's start, 0 if it is there by
        then; in the coordinator's state, since the start of the run.
    """

    step: int
    span: Span
    commitment: Hash
    seconds: float


@dataclass(frozen=True)
class Pace:
    """What a run has of it, the same in all of its rounds.

    Attributes:
      quorum: Messages at which a round begins to close, K.
      grace_seconds: How long it waits for others then.
      max_age: Versions of the params that may come after those that a message began with; an older
        one is not merged.
      shares: Sequences that each peer is given in a round, by peer.
      settle_every: Every so many rounds, and in the last one, a round waits for all messages, as
        one without a pace does, and none travels on: so a snapshot after it is the whole state. 0
        for never.
      last: The last round.
    """

    quorum: int
    grace_seconds: float
    max_age: int
    shares: tuple[int, ...]
    settle_every: int
    last: int

    def settles(self, step: int) -> bool:
        """Return whether nothing travels on from a round."""
        every = self.settle_every
        return every > 0 and (step % every == 0 or step == self.last)

    def closes(self, step: int, arrivals: Iterable[float], awaited: int, limit: float) -> float:
        """Return the seconds after its start at which a round waits no longer.

        Args:
          step: The round.
          arrivals: When messages arrive, seconds after its start; those that never do are absent.
          awaited: Messages that could arrive: of peers with work, and travelling ones.
          limit: max_round_train_time, seconds.
        """
        times, quorum = sorted(arrivals), min(self.quorum, awaited)
        if self.settles(step) or not 0 < quorum <= len(times):
            return limit
        return min(limit, times[quorum - 1] + self.grace_seconds)


def shares_of(speeds: Sequence[float], steps: int, rows: int) -> tuple[int, ...]:
    """Return how many rows each peer is given in a round: whole local steps, by its speed.

        rows * max(1, floor(steps * speed / the fastest peer's))

    Args:
      speeds: Tokens per second, by peer.
      steps: Local steps of the fastest peer.
      rows: Rows of a local step.
    """
    fastest = max(speeds)
    return tuple(rows * max(1, int(steps * speed / fastest + ROUNDING)) for speed in speeds)
