"""Recomputes a published run: its rounds, its params, its drawn windows."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.transcript.entry import Header
from lockstep.transcript.windows import Window
from parts.publication import drawn, layout
from parts.publication.checks import records
from parts.publication.checks.weights import PublishedTranscript, is_workload
from parts.publication.drawn import DrawnWindow
from parts.publication.layout import Publication
from parts.publication.unpacked import Unpacked
from pipeline import runfile
from pipeline.audit import given_rows, honest
from pipeline.audit.audit import audit_header, audit_rounds, audit_snapshot
from pipeline.audit.replay import Replay
from pipeline.audit.sample import Beacon, read_beacon
from pipeline.audit.verdict import Finding, contradictions
from pipeline.start import begin
from pipeline.start.begin import Setup
from pipeline.subject import subject_of


class Audited(NamedTuple):
    """A published transcript, all rounds computed again.

    Attributes:
      setup: The reader's own set-up of the run.
      transcript: The transcript.
      windows: The run's windows.
      total: How many windows of a run like this one can be drawn, see `drawn.possible`.
      published: How many of them are published.
      chosen: Those that the reader repeats.
      findings: What the audit found, none of which contradicts the transcript.
      beacon: What else the published windows were drawn with, or None.
    """

    setup: Setup
    transcript: PublishedTranscript
    windows: list[Window]
    total: int
    published: int
    chosen: list[DrawnWindow]
    findings: list[Finding]
    beacon: Beacon | None

    @property
    def kept(self) -> bool:
        """Whether messages are kept."""
        return self.setup.programs.form.kept

    @property
    def messages(self) -> list[int]:
        """Return how many messages each peer of a chosen window sent in it, window by window."""
        return [
            sum(peer in entry.evidence.messages for entry in self.transcript.window(window))
            for window, peers in self.chosen
            for peer in peers
        ]

    @property
    def connected(self) -> Window:
        """The first of the repeated windows that follow each other to the run's last."""
        first, *earlier = sorted((one.window for one in self.chosen), reverse=True)
        for window in earlier:
            if window.last == first.opening:
                first = window
        return first


def audit(
    folder: Path, unpacked: Unpacked, publication: Publication, run: runfile.Run, chosen: list[str]
) -> Audited:
    """Audit the header and every round, with all messages that are published.

    `chosen` names the rows of the windows to repeat.

    Raises:
      LockstepError: The transcript contradicts itself or the run file, or is not whole.
    """
    weights = folder if run.export.dtype == "float32" else None
    transcript = PublishedTranscript(unpacked.folder, weights)
    header, entries = transcript.header, transcript.rounds
    if publication.rounds != transcript.hash:
        raise LockstepError(
            f"{layout.MANIFEST}: rounds is {publication.rounds[:12]}, expected "
            f"{transcript.hash[:12]} of {layout.TRANSCRIPT}/rounds.jsonl"
        )
    total = run.config.total_steps
    start = entries[0].round.step - 1 if entries else -1
    if start < 0 or len(entries) != total - start:
        raise LockstepError(
            f"{layout.TRANSCRIPT}/rounds.jsonl: {len(entries)} rounds, expected all of {total}"
        )
    if is_workload(transcript) != publication.is_workload:
        raise LockstepError(
            f"{layout.MANIFEST}: lists {'a' if publication.is_workload else 'no'} "
            f"{layout.WORKLOAD}, expected what {layout.TRANSCRIPT}/header.json says"
        )
    subject = subject_of(run)
    subject.check_model(run, header.model, f"{layout.TRANSCRIPT}/header.json")
    columns, bound = publication.columns, subject.vocab_size(header.model)
    rows = given_rows.joined(
        [given_rows.read(folder / name, columns, run, bound) for name in chosen]
    )
    index = entries[0].round.data_index
    setup = begin.blank(run, header.model, rows, columns, start, index)
    due, kept = run.snapshots(start), setup.programs.form.kept
    check_sketched(header, kept=kept)
    if transcript.snapshots != due.steps:
        raise LockstepError(
            f"{layout.TRANSCRIPT}/snapshots: after rounds {transcript.snapshots}, expected after "
            f"{due.steps}"
        )
    known = read_beacon(run.witness.beacon)
    seed = drawn.seed_of(transcript, publication.seed, known)
    published = drawn.draw(transcript, due.windows, seed, publication.windows, kept)
    records.check_transcript(publication, transcript, published, run, kept=kept)
    windows = None if kept else [one.window for one in published]
    findings = audit_header(setup, transcript) + audit_rounds(setup, transcript, windows)
    refuse(contradictions(findings))
    return Audited(
        setup,
        transcript,
        due.windows,
        len(drawn.possible(transcript, due.windows, kept)),
        len(published),
        [one for one in published if drawn.name(one, kept) in chosen],
        findings,
        known,
    )


def check_sketched(header: Header, *, kept: bool) -> None:
    """Check that messages that are not kept have sketches: without, none could be compared.

    Raises:
      LockstepError: The header says otherwise, as a transcript of release 0.2.
    """
    if not kept and not header.sketched:
        raise LockstepError(
            f"{layout.TRANSCRIPT}/header.json: sketched is false, expected true, since messages as "
            "large as these are not kept"
        )


def replay(audited: Audited, why: str | None) -> tuple[Replay, list[Finding]]:
    """Replay the chosen windows; return what they were replayed with, and what was found.

    `why` says why bits cannot be compared; None if they are.

    Raises:
      LockstepError: A snapshot is not as its hashes say.
    """
    setup, transcript = audited.setup, audited.transcript
    windows = drawn.merged(audited.chosen)
    varied = why and honest.measure(setup, transcript, windows)
    replayer = Replay(setup, transcript, why, windows, varied)
    found: list[Finding] = []
    for window, peers in windows:
        last = tuple(peer for peer in peers if transcript.has_own(window.last, peer))
        for step, owners in ((window.opening, peers), (window.last, last)):
            refuse(audit_snapshot(transcript, step, setup.start.state, owners))
        found += replayer.window(window, peers, lambda: None)
    return replayer, found


def refuse(findings: Iterable[Finding]) -> None:
    """Refuse a publication for the first of some findings.

    Raises:
      LockstepError: There is one.
    """
    for finding in findings:
        who = "" if finding.peer is None else f"peer {finding.peer}, "
        raise LockstepError(
            f"{layout.TRANSCRIPT}: round {finding.round}, {who}{finding.kind}: {finding.detail}"
        )
