"""The claims about a published run, and how each is known.

proven     computed again here, from content whose hash is published
sampled    computed again here for some of the run, which a draw chose
stated     the author's word
"""

from typing import Any, Literal, NamedTuple

Kind = Literal["proven", "sampled", "stated"]


class PublicClaim(NamedTuple):
    """One claim: its name for scripts, how it is known, its text, and values for scripts."""

    name: str
    kind: Kind
    text: str
    values: dict[str, Any] = {}

    def to_json(self) -> dict[str, Any]:
        """Return the claim as `json.dumps` takes it."""
        return {"is": self.kind, "text": self.text} | self.values
