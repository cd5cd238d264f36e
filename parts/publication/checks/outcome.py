"""The outcome of `lockstep verify`: the first word that it prints, and the exit status.

Imports next to nothing: `--help` has this table.
"""

from enum import Enum

PUBLISHED_WINDOWS = 4  # that `lockstep publish` draws where nobody asks for another number


class VerifyOutcome(Enum):
    """The word, the exit status, and what they mean."""

    VERIFIED = "verified", 0, "nothing contradicts it, and the reader chose what was repeated"
    CONSISTENT = (
        "consistent, not verified",
        3,
        "nothing contradicts it, but its author chose what was repeated, bits could not be "
        "compared, or another release wrote it",
    )
    CONTRADICTED = "not verified", 1, "something in it contradicts the rest"
    NOT_ASKED = "cannot be asked", 2, "the command is wrong, or asks for what is not published"
    NOT_FETCHED = "not fetched", 4, "a server gave no answer, or refused"

    def __init__(self, word: str, status: int, meaning: str):
        self.word, self.status, self.meaning = word, status, meaning


def table() -> str:
    """Return the exit statuses, a line each, for `--help`."""
    found = sorted(VerifyOutcome, key=lambda outcome: outcome.status)
    return "\n\n".join(f"{one.status}  {one.word}: {one.meaning}" for one in found)
