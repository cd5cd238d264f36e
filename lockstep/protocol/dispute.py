"""Disputes: a verifier recomputed a trainer's step with another result; all others settle it.

The verifier is handed the trainer's own state before the round, to which the trainer committed a
round ago, and recomputes the step on the assigned batch with the trainer's program. The result is
right or wrong bit for bit, so an honest majority settles the dispute. A few tie-breakers that are
drawn can have a majority of liars in one of many rounds, however few liars there are; all of a
round's peers cannot. Whoever loses is out of the run, so a liar can cost the others such work once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Claim(NamedTuple):
    """A step's result: the commitment to the message, and the hash of the state after it, hex."""

    message: Hash
    state: Hash


@dataclass(frozen=True)
class Check:
    """A verifier's report on a trainer's step.

    Attributes:
      verifier: The verifier.
      peer: The trainer.
      found: Result that the verifier reports.
      seconds: Seconds since it was drawn whom to check, fetching the trainer's state included.
      bytes: Size of that state.
    """

    verifier: int
    peer: int
    found: Claim
    seconds: Annotated[float, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Ruling:
    """The result that each other peer reports on the step of `peer` that `verifier` disputes."""

    verifier: int
    peer: int
    found: dict[int, Claim]


def settle(check: Check, claimed: Claim, rulings: Iterable[Ruling], peers: int) -> int | None:
    """Return the loser of a dispute, the peer or the verifier; None if it stays open.

    More than half of the round's `peers`, the two parties among them, must report the same; who
    reports nothing agrees with nobody.
    """
    for ruling in rulings:
        if (ruling.verifier, ruling.peer) == (check.verifier, check.peer):
            found = list(ruling.found.values())
            if 2 * (1 + found.count(check.found)) > peers:
                return check.peer
            if 2 * (1 + found.count(claimed)) > peers:
                return check.verifier
    return None
