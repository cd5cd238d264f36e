"""The result of an audit, verdict.json, and how it follows from the findings.

Docs: docs/explanation/verification.md.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from lockstep.protocol.attestation import Hash
from lockstep.protocol.closing import sender
from lockstep.protocol.round import is_none
from lockstep.tables.table import Table
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit import sample


@dataclass(frozen=True)
class Finding:
    """Something that differs from what an honest run would have."""

    round: int
    peer: int | None  # to blame; None: the transcript's author
    kind: str
    detail: str  # the value and what was expected, in one line
    applied: bool  # whether it got into the params; false if it was discarded in its round
    bundle: str | None = None  # folder in data/verdict with which the replay can be repeated

    def __str__(self) -> str:
        who = "" if self.peer is None else f"peer {self.peer}, "
        return f"round {self.round}, {who}{self.kind}: {self.detail}"


SHOWN_BY = dict.fromkeys(("message", "state", "check"), "replay")
SHOWN_BY |= dict.fromkeys(("payload", "commitment"), "bytes")
SHOWN_BY |= dict.fromkeys(("equivocation", "attestation", "ejected"), "record")
"""What shows each kind of finding against a peer: a replay of its steps; the bytes that it sent; or
nothing but what the transcript's author recorded, which nobody can compute again."""


@dataclass(frozen=True)
class Replayed:
    """A window that was replayed: its number, its rounds, and whose steps were recomputed."""

    window: int
    first: int
    last: int
    peer: int


@dataclass(frozen=True)
class Varied:
    """How far the auditor's own honest messages are apart when it makes bits differ."""

    distance: Annotated[float, Field(ge=0)]  # the largest, of messages there from those here
    there: str  # how that process differs, for people
    messages: Annotated[int, Field(ge=0)]  # how many were compared
    # The largest of the params after a window, as a share of the window's update, and of what peers
    # share then. None where messages are kept, from which both follow to the bit.
    params: Annotated[float | None, Field(ge=0)] = None
    # The largest of what a peer owns after a window, as a share of what the window changed of it,
    # by its kind of arrays. None in a verdict of an earlier release.
    own: dict[str, Annotated[float, Field(ge=0)]] | None = None


@dataclass(frozen=True)
class ComparedMessages:
    """How many messages that are not kept can be compared."""

    messages: int  # of the replayed windows
    sketched: int  # how many of them the transcript has pieces of
    bytes: int  # of these messages
    bytes_shown: int  # of their sketches


class Verdict(Table):
    """verdict.json."""

    accepted: bool
    """Whether stage export may write weights."""
    policy: Literal["applied", "strict"]
    """[witness] policy: whether findings that got into the params refuse the run, or any."""
    method: Literal["bitwise", "tolerance", "none"]
    """How replays were compared with what was sent; none where an honest step does not repeat, so
    that a replay shows nothing: such a run cannot be audited."""
    why_not_bitwise: str | None
    """Why bits could not be compared; null if they were."""
    tolerance: float | None
    """Largest accepted distance of a message from its replay; null if bits were compared."""
    params_tolerance: float | None = Field(default=None, ge=0, exclude_if=is_none)
    """Largest accepted distance of the params after a window from those that follow from its
    messages, as a share of the window's update, and of what peers share then; absent where these
    are compared bit for bit."""
    own_tolerance: dict[str, float] | None = Field(default=None, exclude_if=is_none)
    """Largest accepted distance of what a replayed peer owns after a window, as a share of what the
    window changed of it, by its kind of arrays; absent where it was compared bit for bit or, since
    nothing was learnt of it, not at all."""
    repeats: float | None = Field(default=None, ge=0, exclude_if=is_none)
    """Largest distance among the auditor's honest repeats of a step, from which the tolerance of a
    workload follows; absent where it is a fixed one."""
    varied: Varied | None = Field(default=None, exclude_if=is_none)
    """How far honest messages of the auditor are from such with other threads and instructions,
    from which the tolerance follows; absent where that was not measured."""
    compared: ComparedMessages | None = Field(default=None, exclude_if=is_none)
    """What there is to compare of messages that are not kept; absent where messages are kept."""
    clock: Literal["simulated", "wall", "store"]
    """Whether arrival times follow from [links], or are real ones that nobody can compute again."""
    audited_rounds: int
    """Number of rounds in the transcript."""
    empty_rounds: int
    """Number of rounds in which no message was applied; if all are, nothing is exported."""
    windows: int
    """Number of windows in the run: one peer, from one snapshot to the next, if it sent a message
    in between; of all peers if one did, where messages are not kept."""
    replayed_windows: tuple[Replayed, ...]
    """Those of them that were replayed."""
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
    remaining = [f for f in findings if f.kind != "ejected" or (f.round, f.peer) not in explained]
    return sorted(remaining, key=lambda f: f.round)


# ---- From findings to a verdict ----


class ReplayComparison(NamedTuple):
    """How replays were compared with what was sent (`tolerance.how`).

    Limits are the largest accepted distances; `limit` follows from `repeats` or `varied`, if there
    is one.
    """

    why: str | None = None  # bits could not be compared; None if they were: then all else is None
    limit: float | None = None  # of a message
    params_limit: float | None = None  # of the params after a window; None: they follow to the bit
    # of what a peer owns then, by kind; None: not compared
    own_limits: dict[str, float] | None = None
    repeats: float | None = None  # the largest distance among an auditor's honest repeats
    varied: Varied | None = None  # what the auditor measured of other bits

    @property
    def tells(self) -> bool:
        """Whether a replay can tell a lie from an honest step."""
        return self.limit is None or math.isfinite(self.limit)


def judge(
    run: runfile.Run,
    transcript: Transcript,
    findings: Sequence[Finding],
    how: ReplayComparison,
    windows: Sequence[Window],
    replayed: Sequence[tuple[Window, int]],
) -> Verdict:
    """Return the verdict on an audited transcript: everything in it follows from the arguments.

    `windows` are all of the run's.
    """
    ejected, dropped, late = {}, {}, Counter()
    empty = sum(not entry.decision.applied for entry in transcript.rounds)
    for entry in transcript.rounds:
        for peer in entry.decision.ejected:
            ejected.setdefault(peer, entry.round.step)
        for peer in entry.decision.dropped:
            dropped.setdefault(peer, entry.round.step)
        late.update(map(sender, entry.decision.late))
    kept = not transcript.header.sketched
    return Verdict(
        accepted=accepts(run.witness.policy, findings) and empty < len(transcript.rounds),
        policy=run.witness.policy,
        method="none" if not how.tells else "tolerance" if how.why else "bitwise",
        why_not_bitwise=how.why,
        tolerance=how.limit if how.tells else None,
        params_tolerance=how.params_limit if how.tells else None,
        own_tolerance=how.own_limits,
        repeats=how.repeats,
        varied=how.varied,
        compared=_compared(transcript, replayed),
        clock=run.links.clock,
        audited_rounds=len(transcript.rounds),
        empty_rounds=empty,
        windows=sum(map(len, sample.groups(run, transcript, windows, kept))),
        replayed_windows=tuple(
            Replayed(windows.index(window), window.first, window.last, peer)
            for window, peer in replayed
        ),
        sample_seed=sample.seed_of(run, transcript),
        sample_seed_of=sample.whose_seed(run),
        transcript=transcript.hash,
        ejected=ejected,
        dropped=dropped,
        late=dict(sorted(late.items())),
        findings=tuple(findings),
    )


def _compared(
    transcript: Transcript, replayed: Sequence[tuple[Window, int]]
) -> ComparedMessages | None:
    """Return how many messages of the replayed windows can be compared with a replay."""
    if not transcript.header.sketched:
        return None
    rounds = {entry.round.step: entry.evidence.messages for entry in transcript.rounds}
    steps = [(step, peer) for window, peer in replayed for step in window.rounds]
    sent = [rounds[step][peer] for step, peer in steps if peer in rounds.get(step, {})]
    shown = [message for message in sent if message.sketch is not None]
    return ComparedMessages(
        messages=len(sent),
        sketched=len(shown),
        bytes=sum(message.bytes for message in shown),
        bytes_shown=sum(message.held for message in shown),
    )
