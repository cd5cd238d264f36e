"""What an audit came to: verdict.json. Docs: docs/explanation/verification.md."""

from collections.abc import Sequence
from typing import Literal

from pydantic.dataclasses import dataclass

from pipeline.protocol.dispute import Hash
from pipeline.runfile.table import Table


@dataclass(frozen=True)
class Finding:
    """Something that is not as an honest run would have it.

    Attributes:
      round: The step.
      peer: Who is to blame; None: the transcript's author.
      kind: What was found wrong.
      detail: Found and expected, in one line.
      applied: Whether it got into the params: false for what was discarded in its round.
      bundle: The folder, in data/verdict, that repeats the replay which found it.
    """

    round: int
    peer: int | None
    kind: str
    detail: str
    applied: bool
    bundle: str | None = None


@dataclass(frozen=True)
class Replayed:
    """A window that was replayed: rounds `first` to `last` of one peer."""

    window: int
    first: int
    last: int
    peer: int


class Verdict(Table):
    """verdict.json."""

    accepted: bool
    """Whether stage export may write weights."""
    policy: Literal["applied", "strict"]
    """[witness] policy: which findings refuse; those that got into the params, or any."""
    method: Literal["bitwise", "tolerance"]
    """How a replay is compared with what was sent."""
    why_not_bitwise: str | None
    """What stands in the way of comparing bits; null where they are compared."""
    tolerance: float | None
    """The largest accepted distance of a message from its replay; null where bits are compared."""
    audited_rounds: int
    """Rounds of the transcript."""
    windows: int
    """Windows of the run: one peer, from one snapshot to the next."""
    replayed_windows: tuple[Replayed, ...]
    """Those that were replayed."""
    sample_seed: str
    """What the sample was drawn from."""
    sample_seed_of: Literal["auditor", "transcript"]
    """Whose choice that was; the transcript's own hash can be ground by whoever wrote it."""
    transcript: Hash
    """SHA-256 of rounds.jsonl, which holds every commitment."""
    ejected: dict[int, int]
    """Peers that were caught while training, and in which round."""
    dropped: dict[int, int]
    """Peers that were not heard from any more, and since which round at first."""
    late: dict[int, int]
    """How many messages of each peer came too late, or never."""
    findings: tuple[Finding, ...]
    """Whatever was found."""


def accepts(policy: str, findings: Sequence[Finding]) -> bool:
    """Whether the findings leave a run's params as good as an honest run's."""
    return not any(finding.applied or policy == "strict" for finding in findings)


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """The findings by round; that a peer was ejected is left out where another one says why."""
    said = {(f.round, f.peer) for f in findings if f.kind != "ejected"}
    kept = [f for f in findings if f.kind != "ejected" or (f.round, f.peer) not in said]
    return sorted(kept, key=lambda f: f.round)
