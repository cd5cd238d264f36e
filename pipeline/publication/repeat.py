"""What of a published run is computed again: its rounds, its drawn windows, its held-out loss."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline import runfile
from pipeline.audit import given_rows
from pipeline.audit.audit import audit_header, audit_rounds, audit_snapshot
from pipeline.audit.replay import Replay, why_not_bitwise
from pipeline.audit.verdict import Finding, Verdict, contradictions
from pipeline.errors import LockstepError
from pipeline.programs import held_out
from pipeline.programs.held_out import HeldOutRows
from pipeline.publication import layout, records, results
from pipeline.publication.drawn import Drawn, draw
from pipeline.publication.layout import Publication
from pipeline.publication.results import Evaluated
from pipeline.publication.weights import PublishedTranscript, is_workload, params_of
from pipeline.runfile.explain import validate_json
from pipeline.swarm import begin
from pipeline.swarm.begin import Setup
from pipeline.tokens.columns import counted
from pipeline.transcript.transcript import Transcript
from pipeline.weights import exported
from pipeline.workload import export_folder
from pipeline.workload.choice import check_model, vocab_size


class Audited(NamedTuple):
    """A published transcript, all rounds computed again, and its published (`drawn`) windows."""

    setup: Setup
    transcript: PublishedTranscript
    windows: list[runfile.Window]
    drawn: Drawn
    findings: list[Finding]


def audit(folder: Path, publication: Publication, run: runfile.Run) -> Audited:
    """Audit the header and every round, with the messages of the drawn windows.

    Raises:
      LockstepError: The transcript contradicts itself or the run file, or is not whole.
    """
    weights = folder if run.export.dtype == "float32" else None
    transcript = PublishedTranscript(folder / layout.TRANSCRIPT, weights)
    header, entries = transcript.header, transcript.rounds
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
    check_model(run, header.model, f"{layout.TRANSCRIPT}/header.json")
    columns = publication.columns
    rows = given_rows.read(folder / layout.TOKENS, columns, run, vocab_size(header.model))
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
    records.check_transcript(publication, transcript, drawn, run)
    return Audited(setup, transcript, due.windows, drawn, findings)


def replay(audited: Audited, verdict: Verdict) -> tuple[str, float] | None:
    """Replay the drawn windows; return None if bits were compared.

    Else return why they could not be, and the largest distance of a message from its replay that
    was accepted.

    Raises:
      LockstepError: Something was found that the verdict does not have.
    """
    setup, transcript = audited.setup, audited.transcript
    why = why_not_bitwise(setup, transcript.header)
    replayer = Replay(setup, transcript, bitwise=not why, present=audited.drawn)
    found = list(audited.findings)
    for window, peers in audited.drawn:
        for step, owners in ((window.opening, peers), (window.last, ())):
            _refuse(audit_snapshot(transcript, step, setup.start.state, owners))
        found += replayer.window(window, peers, lambda: None)
    known = {(finding.round, finding.peer) for finding in verdict.findings}
    _refuse(f for f in found if f.applied or (f.round, f.peer) not in known)
    return (why, replayer.limit) if why else None


def read_evaluated(folder: Path) -> Evaluated:
    """Read evaluate.json of a publication.

    Raises:
      LockstepError: It is not as stage evaluate writes it.
    """
    return validate_json(Evaluated, (folder / layout.EVALUATED).read_bytes(), layout.EVALUATED)


class Measured(NamedTuple):
    """What was measured on the published held-out sequences.

    Attributes:
      loss: Nats per token.
      sequences: How many sequences there are.
      different: How many of them differ from each other.
      asked: How many the run file asks for.
    """

    loss: float
    sequences: int
    different: int
    asked: int


def measure(
    folder: Path,
    publication: Publication,
    setup: Setup,
    transcript: Transcript,
    said: Evaluated,
) -> Measured | None:
    """Measure again what evaluate.json says of held-out text; None where nothing was held out.

    Raises:
      LockstepError: A number is another, or the sequences are not the first held-out ones.
    """
    run = setup.run
    if transcript.header.held_out_loss is None:
        for name, value in said.held_out.items():
            if value is not None:
                raise LockstepError(
                    f"{layout.EVALUATED}: {name} is {value}, expected null, since nothing was held "
                    "out in training"
                )
        return None
    if layout.HELD_OUT not in publication.files:
        raise LockstepError(f"{layout.HELD_OUT}: no such file, expected the held-out sequences")
    rows_NW, asked = _held_out_rows(folder, publication, setup), run.held_out.sequences
    if publication.is_workload:
        worker, params = setup.programs.worker, params_of(folder, transcript)
        size = run.peers.micro_batch
        loss = export_folder.held_out_loss(worker, params, rows_NW, size)
        results.compare_of_workload(said, loss, len(rows_NW))
    else:
        model = exported.read(folder, scan=run.peers.scan_layers)
        data = HeldOutRows(rows_NW, publication.columns)
        loss = held_out.exported_loss(model.features, model.head, model.params, data, run.peers)
        results.compare(said, loss, data, model.tokenizer)
    return Measured(loss, len(rows_NW), len(np.unique(rows_NW, axis=0)), asked)


def _held_out_rows(folder: Path, publication: Publication, setup: Setup) -> np.ndarray:
    columns, run, model = publication.columns, setup.run, setup.model
    rows = given_rows.read(folder / layout.HELD_OUT, columns, run, vocab_size(model))
    count, asked = len(rows.rows_NW), run.held_out.sequences
    if count > asked or rows.indices_N[-1] != count - 1:
        raise LockstepError(
            f"{layout.HELD_OUT}: {count} sequences up to {rows.indices_N[-1]}, expected at most "
            f"the first {asked}"
        )
    data = HeldOutRows(rows.rows_NW, columns)
    if not publication.is_workload and not counted(*data).any(axis=1).all():
        raise LockstepError(f"{layout.HELD_OUT}: a sequence without a prediction, expected none")
    return rows.rows_NW


def _refuse(findings: Iterable[Finding]) -> None:
    for finding in findings:
        who = "" if finding.peer is None else f"peer {finding.peer}, "
        raise LockstepError(
            f"{layout.TRANSCRIPT}: round {finding.round}, {who}{finding.kind}: {finding.detail}"
        )
