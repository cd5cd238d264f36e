"""From findings to a verdict."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit import sample
from pipeline.audit.tolerance import limit, own_limits
from pipeline.audit.verdict import ComparedMessages, Finding, Replayed, Varied, Verdict, accepts


class How(NamedTuple):
    """How replays were compared with what was sent.

    Attributes:
      why: Why bits could not be compared; None if they were.
      exact: Whether params follow from messages to the bit (`Replay.merges_exactly`).
      repeats: Largest distance among the auditor's honest repeats, which counts only where a
        workload's messages were compared by tolerance: in any other verdict it would loosen a fixed
        bound.
      varied: What the auditor measured of other bits, which counts where `repeats` does not.
    """

    why: str | None
    exact: bool
    repeats: float | None = None
    varied: Varied | None = None


def judge(
    run: runfile.Run,
    transcript: Transcript,
    findings: Sequence[Finding],
    how: How,
    windows: Sequence[runfile.Window],
    replayed: Sequence[tuple[runfile.Window, int]],
) -> Verdict:
    """Return the verdict on an audited transcript: everything in it follows from the arguments.

    `windows` are all of the run's.
    """
    why = how.why
    repeats = how.repeats if why and run.workload.factory else None
    varied = how.varied if why and not run.workload.factory else None
    ejected, dropped, late = {}, {}, Counter()
    empty = sum(not entry.decision.applied for entry in transcript.rounds)
    for entry in transcript.rounds:
        for peer in entry.decision.ejected:
            ejected.setdefault(peer, entry.round.step)
        for peer in entry.decision.dropped:
            dropped.setdefault(peer, entry.round.step)
        late.update(entry.decision.late)
    return Verdict(
        accepted=accepts(run.witness.policy, findings) and empty < len(transcript.rounds),
        policy=run.witness.policy,
        method="tolerance" if why else "bitwise",
        why_not_bitwise=why,
        tolerance=limit(run, repeats, varied and varied.distance) if why else None,
        params_tolerance=None if how.exact else limit(run, repeats, varied and varied.params),
        own_tolerance=own_limits(run, varied) if why else None,
        repeats=repeats,
        varied=varied,
        compared=_compared(transcript, replayed),
        clock=run.links.clock,
        audited_rounds=len(transcript.rounds),
        empty_rounds=empty,
        windows=len(windows) * run.peers.count,
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
    transcript: Transcript, replayed: Sequence[tuple[runfile.Window, int]]
) -> ComparedMessages | None:
    """Of how many messages of the replayed windows the transcript has what a replay compares."""
    if not _keeps_no_messages(transcript):
        return None
    rounds = {entry.round.step: entry.evidence.messages for entry in transcript.rounds}
    sent = [
        rounds[step][peer]
        for window, peer in replayed
        for step in window.rounds
        if peer in rounds.get(step, {})
    ]
    shown = [message for message in sent if message.sketch is not None]
    return ComparedMessages(
        messages=len(sent),
        sketched=len(shown),
        bytes=sum(message.bytes for message in shown),
        bytes_shown=sum(message.held for message in shown),
    )


def _keeps_no_messages(transcript: Transcript) -> bool:
    """Whether messages are not kept, but sketches or, as in release 0.2, nothing of them."""
    if transcript.header.sketched:
        return True
    sent = [m for entry in transcript.rounds for m in entry.evidence.messages.values()]
    return bool(sent) and all(message.payload is None for message in sent)
