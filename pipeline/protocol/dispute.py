"""Disputes: a verifier took a trainer's step again and got something else; others say who is right.

A verifier is handed the trainer's own state as it was before the round, to which the trainer
committed a round ago, and takes the step on the batch that was assigned, by the trainer's program.
What it gets is right or wrong bit for bit, so that an honest majority of tie-breakers settles it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import Field

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Claim(NamedTuple):
    """What a step gave: the commitment to the message, and the hash of the state after it, hex."""

    message: Hash
    state: Hash


@dataclass(frozen=True)
class Check:
    """A verifier's word on a trainer's step.

    Attributes:
      verifier: Who took it again.
      peer: Whose step.
      found: What it gave.
      seconds: From the round's start until it knew, the fetching of the peer's state included.
      bytes: Of that state.
    """

    verifier: int
    peer: int
    found: Claim
    seconds: Annotated[float, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Ruling:
    """What the tie-breakers of a dispute found.

    Attributes:
      verifier, peer: The parties.
      found: What the same step gave each tie-breaker.
    """

    verifier: int
    peer: int
    found: dict[int, Claim]


def settle(check: Check, claimed: Claim, rulings: Iterable[Ruling]) -> int | None:
    """Return who lost a dispute, the peer or the verifier; None where nobody can say.

    More than half of the tie-breakers must have found what one of the parties said.
    """
    for ruling in rulings:
        if (ruling.verifier, ruling.peer) == (check.verifier, check.peer):
            found = list(ruling.found.values())
            if 2 * found.count(check.found) > len(found):
                return check.peer
            if 2 * found.count(claimed) > len(found):
                return check.verifier
    return None
