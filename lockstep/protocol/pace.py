"""How rounds go on without those that are late: Decoupled DiLoCo's quorum, grace and ages.

A round closes at its K-th message and a grace after it, instead of when all have arrived. A message
that is not there by then travels on, and is merged when a later round exchanges its fragment of the
params, with its age. Its peer is given no work while it travels, nor in that round, in which it has
a message already. Peers that are slower by `[links]` are given fewer local steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.protocol.committee import Span

ROUNDING = 1e-9  # of a quotient of speeds that is a whole number but for it


@dataclass(frozen=True)
class OnItsWay:
    """A message that had not arrived when its round was over, and may be merged in a later one.

    Attributes:
      peer: Who sent it.
      step: The round in which it was computed.
      span: First and last sequence that its peer was assigned in it.
      commitment: Commitment to the message, hex.
      at: When it is at every peer, seconds since the start of the run.
    """

    peer: int
    step: int
    span: Span
    commitment: str
    at: float


@dataclass(frozen=True)
class Pace:
    """How a run's rounds go on, the same in all of them.

    Attributes:
      quorum: Messages of its own at which a round begins to close, K. Older ones do not count, or
        one that is there already would close it before anybody has trained.
      grace_seconds: How long it waits for others then, beyond what costs nothing. A message is not
        there before its sender has trained the steps beside which it travels (`links.arrivals`), so
        others have that long anyway: the paper's adaptive window, gamma * slack, with gamma 1.
      max_age: Versions of its fragment that may come after the one that a message began with; an
        older one is not merged.
      fragments: Fragments of the params; rounds exchange one each, in turns.
      rows: Sequences of a local step.
      steps: Local steps of each peer in a round, by peer.
      batch: Sequences of a round in which each peer takes so many steps; in smaller rounds, as a
        batch ramp has them, it takes fewer in proportion.
      settle_every: Every so many rounds, and in the last one, a round waits for all messages, as
        one without a pace does, and none travels on from it: so a snapshot after it is the whole
        state. 0 for never.
      last: The last round.
    """

    quorum: int
    grace_seconds: float
    max_age: int
    fragments: int
    rows: int
    steps: tuple[int, ...]
    batch: int
    settle_every: int
    last: int

    def share(self, peer: int, batch: int) -> int:
        """Return the sequences that a peer is given in a round of at most so many.

        rows * max(1, floor(steps * batch / the largest batch))
        """
        return self.rows * max(1, self.steps[peer] * batch // self.batch)

    def settles(self, step: int) -> bool:
        """Return whether nothing travels on from a round."""
        every = self.settle_every
        return every > 0 and (step % every == 0 or step == self.last)

    def travels_on(self, step: int) -> bool:
        """Return whether a message of a round's fragment may be merged when it is its turn again.

        It may not if a round that settles comes first.
        """
        every, turn = self.settle_every, step + self.fragments
        if not every:
            return True
        return not self.settles(step) and turn <= min((step // every + 1) * every, self.last)

    def closes(self, step: int, arrivals: Iterable[float], awaited: int, limit: float) -> float:
        """Return the seconds after its start at which a round waits no longer.

        Args:
          step: The round.
          arrivals: When its messages arrive, seconds after its start; none of those that never do.
          awaited: Messages that could arrive: of all peers with work.
          limit: max_round_train_time, seconds.
        """
        times, quorum = sorted(arrivals), min(self.quorum, awaited)
        if self.settles(step) or not 0 < quorum <= len(times):
            return limit
        return min(limit, times[quorum - 1] + self.grace_seconds)


def steps_of(speeds: Sequence[float], steps: int) -> tuple[int, ...]:
    """Return how many local steps each peer takes in a round, by its speed.

        max(1, floor(steps * speed / the fastest peer's))

    Args:
      speeds: Tokens per second, by peer.
      steps: Local steps of the fastest peer.
    """
    fastest = max(speeds)
    return tuple(max(1, int(steps * speed / fastest + ROUNDING)) for speed in speeds)
