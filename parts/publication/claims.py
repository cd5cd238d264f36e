"""What `lockstep verify` says of a publication: the outcome, and claims that nothing contradicts.

The lists for people and the object for scripts are made of the same claims. `--help` has the table
of outcomes, so this imports next to nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lockstep.errors import shown
from pipeline.recheck.claim import Kind, PublicClaim

PUBLISHED_WINDOWS = 4  # that `lockstep publish` draws where nobody asks for another number


class VerifyOutcome(Enum):
    """An outcome of `verify`: its word, its exit status, and what they mean."""

    VERIFIED = "verified", 0, "nothing contradicts it, and the reader chose what was repeated"
    CONSISTENT = (
        "consistent, not verified",
        3,
        "nothing contradicts it, but its author chose what was repeated, a window is not "
        "comparable here, another release wrote it, or, of volunteers, a key, a link or a state "
        "lacks",
    )
    CONTRADICTED = "not verified", 1, "something in it contradicts the rest"
    NOT_ASKED = "cannot be asked", 2, "the command is wrong, or asks for what is not published"
    NOT_FETCHED = "not fetched", 4, "a server gave no answer, or refused"
    NOT_FINISHED = "not finished", 6, "this machine's disk, folders or memory stopped the check"

    def __init__(self, word: str, status: int, meaning: str):
        self.word, self.status, self.meaning = word, status, meaning


def table() -> str:
    """Return the exit statuses of `verify`, a line each, for `--help`."""
    outcomes = sorted(VerifyOutcome, key=lambda outcome: outcome.status)
    return "\n\n".join(f"{o.status}  {o.word}: {o.meaning}" for o in outcomes)


HEADINGS: dict[Kind, str] = {
    "proven": "proven, computed again here",
    "sampled": "sampled, computed again here for some of the run",
    "stated": "stated by the author, not proven",
}
# The most important first; files beside the weights, whose claims have their names, are at "".
ORDER = (
    *("digests", "commit", "signature", "files", "start", "weights", "windows"),
    *("not_comparable", "held_out", "card", "", "data", "tasks", "left_out", "other_windows"),
    *("workload", "code", "beacon"),
    *("held_out_split", "findings", "accusations", "verdict", "losses", "keys"),
)


@dataclass(frozen=True)
class Verified:
    """A publication that nothing contradicts, and what is claimed of it."""

    bitwise: bool  # whether the whole sample was compared, which is bit for bit
    claims: list[PublicClaim]
    why_not: list[str]  # why it is consistent only, and not verified; empty where it is
    share: str = ""  # how much was computed again, for the line of a verified one
    training: dict[str, Any] | None = None  # of a publication, as an attestation has it

    @property
    def outcome(self) -> VerifyOutcome:
        """The word and the exit status of `verify`."""
        return VerifyOutcome.CONSISTENT if self.why_not else VerifyOutcome.VERIFIED

    def claim(self, name: str) -> PublicClaim:
        """Return a verified claim by its name."""
        return next(claim for claim in self.claims if claim.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return all that was verified, as `json.dumps` takes it: each claim by its name."""
        return {
            "reason": "; ".join(self.why_not) or None,
            "bitwise": self.bitwise,
            "claims": {claim.name: claim.to_json() for claim in self.claims},
            "training": self.training,
        }

    @property
    def text(self) -> str:
        """The outcome of `verify`, and a list of claims for each way in which they are known."""
        why = self.why_not or ["nothing contradicts it", *filter(None, [self.share])]
        lines = [f"{self.outcome.word}: {'; '.join(why)}"]
        for kind, heading in HEADINGS.items():
            claims = [claim.text for claim in self.claims if claim.kind == kind]
            lines += [heading, *(f"  - {text}" for text in claims)] if claims else []
        return "\n".join(map(shown, lines))


def in_order(claims: Iterable[PublicClaim]) -> list[PublicClaim]:
    """Return claims, the most important first; what is proven is not stated as well."""
    claims = [*claims]
    proven = {claim.name for claim in claims if claim.kind != "stated"}
    left = [claim for claim in claims if claim.kind != "stated" or claim.name not in proven]
    return sorted(left, key=_place)


def _place(claim: PublicClaim) -> tuple[bool, int]:
    unproven_data = (claim.name, claim.kind) == ("data", "stated")  # nothing published shows it
    return unproven_data, ORDER.index(claim.name if claim.name in ORDER else "")
