"""The result of an audit, verdict.json, and how it follows from the findings.

Docs: docs/explanation/verification.md.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from lockstep.files import write_json, write_text
from lockstep.protocol.attestation import Hash
from lockstep.protocol.closing import sender
from lockstep.tables.table import NumberKey, Table
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit import sample, verdict_text
from pipeline.stage.artifacts import METRICS


@dataclass(frozen=True)
class Finding:
    """A finding of an audit: something that differs from what an honest run would have."""

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


class Verdict(Table):
    """The result of an audit, verdict.json."""

    accepted: bool
    """Whether stage export may write weights."""
    policy: Literal["applied", "strict"]
    """[witness] policy: whether findings that got into the params refuse the run, or any."""
    not_comparable: str | None
    """Why a drawn window could not be compared with its replay on the auditor's machine, and where
    it could be; null if all that could be replayed were, bit for bit. Such a window shows nothing,
    and accuses nobody."""
    messages_kept: bool
    """Whether the transcript has the messages themselves; else windows are of all peers."""
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
    """Those of them that were replayed, and compared bit for bit."""
    drawn_windows: int
    """How many of these the sample's seed drew; `[witness] replay` names the others."""
    sample_seed: str
    """Seed that the sample of windows was drawn from."""
    sample_seed_of: Literal["auditor", "beacon", "transcript"]
    """Whose seed that was: the auditor's own, the hash of the transcript, or a beacon's value
    before that hash."""
    transcript: Hash
    """SHA-256 of rounds.jsonl, which holds every commitment."""
    ejected: dict[NumberKey, int]
    """Peers that were caught while training, each with the round."""
    dropped: dict[NumberKey, int]
    """Peers that nobody heard from any more, each with the first such round."""
    late: dict[NumberKey, int]
    """Number of messages of each peer that came too late, or never."""
    findings: tuple[Finding, ...]
    """All findings, by round."""

    def write(self, folder: Path) -> str:
        """Write verdict.json, verdict.txt and the verdict's metrics; return the text."""
        text = verdict_text.render(self.model_dump())
        write_text(folder / "verdict.json", self.model_dump_json(indent=2) + "\n")
        write_text(folder / "verdict.txt", text)
        metrics = {
            "accepted": self.accepted,
            "comparable": self.not_comparable is None,
            "findings": len(self.findings),
            "ejected": len(self.ejected),
            "audited_rounds": self.audited_rounds,
            "replayed_windows": len(self.replayed_windows),
            "windows": self.windows,
        }
        write_json(folder / METRICS / "witness.json", metrics)
        return text


def accepts(policy: str, findings: Sequence[Finding]) -> bool:
    """Return whether a verdict's policy accepts a run with these findings."""
    return not any(finding.applied or policy == "strict" for finding in findings)


def contradictions(findings: Iterable[Finding]) -> list[Finding]:
    """Return those findings of the audit after which nothing can be built on a transcript."""
    return [finding for finding in findings if finding.peer is None or finding.applied]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return a verdict's findings by round, but those on ejected peers that others explain."""
    explained = {(f.round, f.peer) for f in findings if f.kind != "ejected"}
    remaining = [f for f in findings if f.kind != "ejected" or (f.round, f.peer) not in explained]
    return sorted(remaining, key=lambda f: f.round)


# ---- From findings to a verdict ----


def judge(
    run: runfile.Run,
    transcript: Transcript,
    findings: Sequence[Finding],
    not_comparable: str | None,
    windows: Sequence[Window],
    replayed: Sequence[tuple[Window, int]],
    *,
    kept: bool,
) -> Verdict:
    """Return the verdict on an audited transcript: everything in it follows from the arguments.

    `windows` are all of the run's, `replayed` those that were compared bit for bit, with the peer;
    `not_comparable` is why others that were drawn could not be, and `kept` whether messages are.
    """
    ejected, dropped, late = {}, {}, Counter()
    empty = sum(not entry.decision.applied for entry in transcript.rounds)
    for entry in transcript.rounds:
        for peer in entry.decision.ejected:
            ejected.setdefault(peer, entry.round.step)
        for peer in entry.decision.dropped:
            dropped.setdefault(peer, entry.round.step)
        late.update(map(sender, entry.decision.late))
    seed = sample.seed_of(run, transcript)
    drawn = sample.by_chance(run, transcript, [*windows], seed, kept)
    return Verdict(
        accepted=accepts(run.witness.policy, findings) and empty < len(transcript.rounds),
        policy=run.witness.policy,
        not_comparable=not_comparable,
        messages_kept=kept,
        clock=run.links.clock,
        audited_rounds=len(transcript.rounds),
        empty_rounds=empty,
        windows=sum(map(len, sample.groups(run, transcript, windows, kept))),
        replayed_windows=tuple(
            Replayed(windows.index(window), window.first, window.last, peer)
            for window, peer in replayed
        ),
        drawn_windows=len({*drawn}.intersection(replayed)),
        sample_seed=seed,
        sample_seed_of=sample.whose_seed(run),
        transcript=transcript.hash,
        ejected=ejected,
        dropped=dropped,
        late=dict(sorted(late.items())),
        findings=tuple(findings),
    )
