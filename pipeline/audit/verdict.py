"""The result of an audit: verdict.json. Docs: docs/explanation/verification.md."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from lockstep.protocol.dispute import Hash
from lockstep.tables.table import Table


@dataclass(frozen=True)
class Finding:
    """Something that differs from what an honest run would have.

    Attributes:
      round: Step of the round.
      peer: Peer that is to blame, or None if it is the transcript's author.
      kind: Kind of the finding.
      detail: What was found and what was expected, in one line.
      applied: Whether it got into the params; false if it was discarded in its round.
      bundle: Folder in data/verdict with which the replay can be repeated, or None.
    """

    round: int
    peer: int | None
    kind: str
    detail: str
    applied: bool
    bundle: str | None = None


@dataclass(frozen=True)
class Replayed:
    """A window that was replayed.

    Attributes:
      window: Number of the window, from 0.
      first: Its first round.
      last: Its last round.
      peer: Peer whose steps were recomputed.
    """

    window: int
    first: int
    last: int
    peer: int


@dataclass(frozen=True)
class Varied:
    """How far honest messages of the auditor are from each other where it has bits differ.

    Attributes:
      distance: The largest distance of a message computed there from the one computed here.
      there: What was otherwise there, for people to read.
      messages: How many messages were compared.
      params: The largest distance of the params after a window, as a share of the window's update,
        or of what peers share then; None where messages are kept, from which both follow to the
        bit.
      own: The largest distance of what a peer owns after a window, as a share of what the window
        changed of it, by its kind of arrays; None in a verdict of an earlier release.
    """

    distance: Annotated[float, Field(ge=0)]
    there: str
    messages: Annotated[int, Field(ge=0)]
    params: Annotated[float | None, Field(ge=0)] = None
    own: dict[str, Annotated[float, Field(ge=0)]] | None = None


@dataclass(frozen=True)
class ComparedMessages:
    """What there is to compare of messages that are not kept.

    Attributes:
      messages: Messages of the replayed windows.
      sketched: Of how many of them the transcript has pieces.
      bytes: Size of these messages.
      bytes_shown: Size of their sketches.
    """

    messages: int
    sketched: int
    bytes: int
    bytes_shown: int


def _is_none(value: object) -> bool:
    return value is None


class Verdict(Table):
    """verdict.json."""

    accepted: bool
    """Whether stage export may write weights."""
    policy: Literal["applied", "strict"]
    """[witness] policy: whether findings that got into the params refuse the run, or any."""
    method: Literal["bitwise", "tolerance"]
    """How replays were compared with what was sent."""
    why_not_bitwise: str | None
    """Why bits could not be compared; null if they were."""
    tolerance: float | None
    """Largest accepted distance of a message from its replay; null if bits were compared."""
    params_tolerance: float | None = Field(default=None, ge=0, exclude_if=_is_none)
    """Largest accepted distance of the params after a window from those that follow from its
    messages, as a share of the window's update, and of what peers share then; absent where these
    are compared bit for bit."""
    own_tolerance: dict[str, float] | None = Field(default=None, exclude_if=_is_none)
    """Largest accepted distance of what a replayed peer owns after a window, as a share of what the
    window changed of it, by its kind of arrays; absent where it was compared bit for bit or, since
    nothing was learnt of it, not at all."""
    repeats: float | None = Field(default=None, ge=0, exclude_if=_is_none)
    """Largest distance among the auditor's honest repeats of a step, from which the tolerance of a
    workload follows; absent where it is a fixed one."""
    varied: Varied | None = Field(default=None, exclude_if=_is_none)
    """How far honest messages of the auditor are from such with other threads and instructions,
    from which the tolerance follows; absent where that was not measured."""
    compared: ComparedMessages | None = Field(default=None, exclude_if=_is_none)
    """What there is to compare of messages that are not kept; absent where messages are kept."""
    clock: Literal["simulated", "wall"]
    """Whether arrival times follow from [links], or are real ones that nobody can compute again."""
    audited_rounds: int
    """Number of rounds in the transcript."""
    empty_rounds: int
    """Number of rounds in which no message was applied; if all are, nothing is exported."""
    windows: int
    """Number of windows in the run: one peer, from one snapshot to the next."""
    replayed_windows: tuple[Replayed, ...]
    """The windows that were replayed."""
    sample_seed: str
    """Seed that the sample of windows was drawn from."""
    sample_seed_of: Literal["auditor", "beacon", "transcript"]
    """Whose seed that was: the auditor's own, the hash of the transcript, or a beacon's value
    before that hash."""
    transcript: Hash
    """SHA-256 of rounds.jsonl, which holds every commitment."""
    ejected: dict[int, int]
    """Peers that were caught while training, each with the round."""
    dropped: dict[int, int]
    """Peers that nobody heard from any more, each with the first such round."""
    late: dict[int, int]
    """Number of messages of each peer that came too late, or never."""
    findings: tuple[Finding, ...]
    """All findings, by round."""


def accepts(policy: str, findings: Sequence[Finding]) -> bool:
    """Return whether the policy accepts a run with these findings."""
    return not any(finding.applied or policy == "strict" for finding in findings)


def contradictions(findings: Iterable[Finding]) -> list[Finding]:
    """Return those findings of the audit after which nothing can be built on a transcript."""
    return [finding for finding in findings if finding.peer is None or finding.applied]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings by round, without those on ejected peers that another one explains."""
    explained = {(f.round, f.peer) for f in findings if f.kind != "ejected"}
    kept = [f for f in findings if f.kind != "ejected" or (f.round, f.peer) not in explained]
    return sorted(kept, key=lambda f: f.round)
