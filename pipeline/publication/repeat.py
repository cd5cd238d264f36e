"""What of a published run is computed again: its rounds, its drawn windows, its held-out loss."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import runfile
from pipeline.audit import given_rows
from pipeline.audit.audit import audit_header, audit_rounds, audit_snapshot
from pipeline.audit.replay import Replay, why_not_bitwise
from pipeline.audit.verdict import Finding, Verdict, contradictions
from pipeline.errors import LockstepError
from pipeline.programs import held_out
from pipeline.programs.held_out import HeldOutRows
from pipeline.publication import layout
from pipeline.publication.drawn import Drawn, draw
from pipeline.publication.layout import Publication
from pipeline.runfile.explain import validate_json
from pipeline.runfile.table import Table
from pipeline.swarm import begin
from pipeline.swarm.begin import Setup
from pipeline.transcript.transcript import Transcript
from pipeline.weights import exported, hf

LOSS_TOLERANCE = 1e-3  # nats: rounding of another machine


class Evaluated(Table, extra="ignore"):
    """evaluate.json, as far as it is read."""

    held_out_loss: float | None
    """Nats per token."""
    tasks: dict[str, Any] = {}
    """Scores of tasks by their names."""


class Audited(NamedTuple):
    """A published transcript, whose rounds were all computed again.

    Attributes:
      setup: What it was audited with.
      transcript: The transcript.
      windows: The run's windows.
      drawn: The published ones.
      findings: What the audit found.
    """

    setup: Setup
    transcript: Transcript
    windows: list[runfile.Window]
    drawn: Drawn
    findings: list[Finding]


def audit(folder: Path, publication: Publication, run: runfile.Run) -> Audited:
    """Audit the header and every round, with the messages of the drawn windows.

    Raises:
      LockstepError: The transcript contradicts itself or the run file, or is not whole.
    """
    transcript = Transcript(folder / layout.TRANSCRIPT)
    header, entries = transcript.header, transcript.rounds
    total = run.config.total_steps
    start = entries[0].round.step - 1 if entries else -1
    if start < 0 or len(entries) != total - start:
        raise LockstepError(
            f"{layout.TRANSCRIPT}/rounds.jsonl: {len(entries)} rounds, expected all of {total}"
        )
    hf.model_of(header.model, f"{layout.TRANSCRIPT}/header.json")  # refuses an unknown model
    columns, vocab_size = publication.columns, header.model["vocab_size"]
    rows = given_rows.read(folder / layout.TOKENS, columns, run, vocab_size)
    index = entries[0].round.data_index
    setup = begin.blank(run, header.model, rows, columns, start, index)
    due, kept = run.snapshots(start), setup.programs.form.kept
    if transcript.snapshots != due.steps:
        raise LockstepError(
            f"{layout.TRANSCRIPT}/snapshots: after rounds {transcript.snapshots}, expected after "
            f"{due.steps}"
        )
    drawn = draw(transcript, due.windows, publication.seed, publication.windows, kept)
    findings = audit_header(setup, transcript)
    findings += audit_rounds(setup, transcript, [window for window, _ in drawn])
    _refuse(contradictions(findings))
    return Audited(setup, transcript, due.windows, drawn, findings)


def replay(audited: Audited, verdict: Verdict) -> str | None:
    """Replay the drawn windows; return why bits could not be compared here, or None.

    Raises:
      LockstepError: Something was found that the verdict does not have.
    """
    setup, transcript = audited.setup, audited.transcript
    why = why_not_bitwise(setup.run, transcript.header)
    replayer = Replay(setup, transcript, bitwise=not why)
    found = list(audited.findings)
    for window, peers in audited.drawn:
        for step, owners in ((window.opening, peers), (window.last, ())):
            _refuse(audit_snapshot(transcript, step, setup.start.state, owners))
        found += replayer.window(window, peers, lambda: None)
    known = {(finding.round, finding.peer) for finding in verdict.findings}
    _refuse(f for f in found if f.applied or (f.round, f.peer) not in known)
    return why


def read_evaluated(folder: Path) -> Evaluated:
    """Read evaluate.json of a publication.

    Raises:
      LockstepError: It is not as stage evaluate writes it.
    """
    return validate_json(Evaluated, (folder / layout.EVALUATED).read_bytes(), layout.EVALUATED)


def held_out_loss(
    folder: Path, publication: Publication, run: runfile.Run, said: float | None
) -> float | None:
    """Measure the held-out loss again, nats per token; None where nothing was held out.

    Args:
      folder: The publication.
      publication: Its list of files.
      run: Its run.
      said: What evaluate.json says.

    Raises:
      LockstepError: It is another.
    """
    if said is None:
        return None
    model = exported.read(folder, scan=run.peers.scan_layers)
    columns, vocab_size = publication.columns, model.config.vocab_size
    rows = given_rows.read(folder / layout.HELD_OUT, columns, run, vocab_size)
    data = HeldOutRows(rows.rows_NW, columns)
    found = held_out.exported_loss(model.features, model.head, model.params, data, run.peers)
    if not abs(found - said) <= LOSS_TOLERANCE:
        raise LockstepError(
            f"{layout.EVALUATED}: held_out_loss is {said:.4f}, expected {found:.4f} as measured "
            "here"
        )
    return found


def _refuse(findings: Iterable[Finding]) -> None:
    for finding in findings:
        who = "" if finding.peer is None else f"peer {finding.peer}, "
        raise LockstepError(
            f"{layout.TRANSCRIPT}: round {finding.round}, {who}{finding.kind}: {finding.detail}"
        )
