"""Disputes: a verifier recomputed a trainer's step with another result; all other peers rule.

The verifier gets the trainer's own state before the round, to which the trainer committed a round
ago, and recomputes the step on the assigned batch with the trainer's program. The result is right
or wrong bit for bit, so an honest majority settles the dispute. All peers rule, because among a few
drawn tie-breakers liars would be the majority in some round, however few liars there are. The
loser is ejected, so a liar can cost the others this work only once.
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
      seconds: Seconds from the draw to the report, fetching the trainer's state included.
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

    More than half of the round's `peers`, the two parties among them, must report the same result.
    A peer that reports nothing agrees with nobody, so silence never ejects an honest peer.
    """
    for ruling in rulings:
        if (ruling.verifier, ruling.peer) == (check.verifier, check.peer):
            found = list(ruling.found.values())
            if 2 * (1 + found.count(check.found)) > peers:
                return check.peer
            if 2 * (1 + found.count(claimed)) > peers:
                return check.verifier
    return None
