"""The claims of `lockstep verify` about a publication, each with how it is known.

    proven     computed again here, from content whose hash is published
    sampled    computed again here for some of the run, which a draw chose
    stated     the author's word

The lists for people and the object for scripts are made of the same claims.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lockstep.errors import brief, shown
from parts.publication.outcome import VerifyOutcome

if TYPE_CHECKING:  # it imports JAX, and these are made before that may be
    from parts.publication.drawn import DrawnWindow

Kind = Literal["proven", "sampled", "stated"]
SeedOf = Literal["reader", "asked", "author", "beacon", "hash"]
HEADINGS: dict[Kind, str] = {
    "proven": "proven, computed again here",
    "sampled": "sampled, computed again here for some of the run",
    "stated": "stated by the author, not proven",
}
LONGEST = 200  # characters of a reason that a stranger gave


class PublicClaim(NamedTuple):
    """One claim.

    Attributes:
      name: Its name, for scripts.
      kind: How it is known.
      text: What is claimed.
      values: What scripts may want of it.
    """

    name: str
    kind: Kind
    text: str
    values: dict[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Return it as `json.dumps` takes it."""
        return {"is": self.kind, "text": self.text} | self.values


class Sample(NamedTuple):
    """The windows that were repeated, and how they were drawn and compared.

    Attributes:
      chosen: The windows, with their peers.
      messages: How many messages each of these peers sent in its window, in the same order.
      published: How many windows the publication has; one of all its peers counts once.
      total: How many the run has.
      seed_of: Whose seed drew: the reader's, among those published (`reader`); a word of the
        reader's that the author has too (`asked`); the author's own (`author`); a beacon's
        (`beacon`); or nobody's but the transcript's hash, which the author makes (`hash`).
      why_not_bitwise: Why bits could not be compared, or None.
      tolerance: Largest accepted distance of a message from its replay; None where bits were
        compared.
      params_tolerance: The same of the params after a window; None where they are exact.
      own_compared: Whether what peers own after a window was compared, where it is published.
      beacon: What the beacon is, or None.
    """

    chosen: "list[DrawnWindow]"
    messages: list[int]
    published: int
    total: int
    seed_of: SeedOf
    why_not_bitwise: str | None
    tolerance: float | None
    params_tolerance: float | None
    own_compared: bool
    beacon: str | None = None

    def claim(self) -> PublicClaim:
        """Return what is claimed of the sample."""
        repeated = [(*window, peer) for window, peers in self.chosen for peer in peers]
        several = len(repeated) > 1
        named = ", ".join(
            f"{first}-{last} of peer {peer} with {count} message{'' if count == 1 else 's'}"
            for (first, last, peer), count in zip(repeated, self.messages, strict=True)
        )
        count = len(self.chosen)
        text = f"window{'s' if several else ''} {named} ({count} of {self.total}, {self._drawn()}) "
        text += self._compared(several)
        values = {
            "repeated": repeated,
            "messages": self.messages,
            "published": self.published,
            "total": self.total,
            "drawn_by": self.seed_of,
            "bitwise": self.why_not_bitwise is None,
            "why_not_bitwise": self.why_not_bitwise,
            "tolerance": self.tolerance,
            "params_tolerance": self.params_tolerance,
        }
        return PublicClaim("windows", "sampled", text, values)

    def why_not_verified(self) -> Iterator[str]:
        """Yield why the sample is too weak for the word *verified*.

        An author who may vary what the draw follows varies it until the drawn windows are honest.
        So either all are repeated, or the reader draws, after the publication and among all.
        """
        if self.why_not_bitwise is not None:
            yield "bits could not be compared"
        if len(self.chosen) == self.total:
            return
        if self.seed_of != "reader":
            yield "its author could choose what was repeated"
        elif self.published < self.total:
            yield f"its author chose the {self.published} of {self.total} windows to draw among"

    def _drawn(self) -> str:
        if len(self.chosen) == self.total:
            return "all there are"
        return {
            "reader": f"drawn by the reader's seed from the {self.published} that are published",
            "asked": "drawn by the transcript's hash and a word that the author has too, and could "
            "try hashes for",
            "author": "drawn by the transcript's hash and the author's own seed",
            "beacon": f"drawn by the transcript's hash and the beacon, {self.beacon}",
            "hash": "drawn by the author: by the transcript's hash, which the author can vary",
        }[self.seed_of]

    def _compared(self, several: bool) -> str:
        if self.why_not_bitwise is None:
            return f"repeat{'' if several else 's'} bit for bit"
        free = "what peers own is not compared"
        if self.own_compared:
            free = "what peers own is compared only where the next window is published too"
        if self.params_tolerance is not None:
            free += "; the params after a window, and what peers share then, may be off by "
            free += f"{self.params_tolerance:.3g} of what it changed, and only drawn pieces of "
            free += "messages are compared"
        return (
            f"compared by tolerance (distance of a message at most {self.tolerance:.3g}, within "
            f"which it may be anything; {free}), because the publisher says: "
            f"{brief(self.why_not_bitwise, LONGEST)}"
        )


@dataclass(frozen=True)
class Verified:
    """A publication that nothing contradicts, and what is claimed of it.

    Attributes:
      bitwise: Whether the sample was compared bit for bit.
      claims: The claims, the most important first.
      why_not: Why it is consistent only, and not verified; empty where it is.
    """

    bitwise: bool
    claims: list[PublicClaim]
    why_not: list[str]

    @property
    def outcome(self) -> VerifyOutcome:
        """The word and the exit status."""
        return VerifyOutcome.CONSISTENT if self.why_not else VerifyOutcome.VERIFIED

    def claim(self, name: str) -> PublicClaim:
        """Return a claim by its name."""
        return next(claim for claim in self.claims if claim.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return all of it, as `json.dumps` takes it: each claim by its name."""
        return {
            "reason": "; ".join(self.why_not) or None,
            "bitwise": self.bitwise,
            "claims": {claim.name: claim.to_json() for claim in self.claims},
        }

    @property
    def text(self) -> str:
        """The outcome, and a list of claims for each way in which they are known."""
        said = [f"{self.outcome.word}: {'; '.join(self.why_not) or 'nothing contradicts it'}"]
        for kind, heading in HEADINGS.items():
            claims = [claim.text for claim in self.claims if claim.kind == kind]
            said += [heading, *(f"  - {text}" for text in claims)] if claims else []
        return "\n".join(map(shown, said))
