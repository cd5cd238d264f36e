"""`lockstep verify`: each stage is asked to make its outputs again from what is published."""

from contextlib import closing
from importlib import import_module
from pathlib import Path

from lockstep import __version__
from lockstep.errors import LockstepError, RequestError, brief
from lockstep.transcript.entry import Header
from parts.publication import draws
from parts.publication.checks import records, transcript
from parts.publication.checks.claims import Verified, in_order
from parts.publication.checks.transcript import Unpacked
from parts.publication.draws import ReaderAsks
from parts.publication.layout import MANIFEST, Publication
from pipeline import again, runfile
from pipeline.again.claim import PublicClaim
from pipeline.again.outputs import HEADER, TRANSCRIPT
from pipeline.again.published import Draw, Own, PublishedRun, PublishedTranscript, refuse
from pipeline.audit import given_rows
from pipeline.audit.audit import audit_header, audit_rounds
from pipeline.audit.sample import Beacon, read_beacon
from pipeline.audit.verdict import contradictions
from pipeline.stage.keys import STAGES
from pipeline.start import begin
from pipeline.subject import subject_of, subject_of_model


def verify(
    folder: Path,
    publication: Publication,
    run: runfile.Run,
    asks: ReaderAsks,
    own: Own,
    max_gb: int,
) -> Verified:
    """Check a publication whose files are as its list says.

    Of the windows that were not chosen files may be missing. The files of its transcript may have
    at most `max_gb` 10^9 bytes together.

    Raises:
      LockstepError: Something in it contradicts the rest.
    """
    rows = draws.choose(publication, asks)
    skip = draws.not_needed(publication, rows)
    unpacked = transcript.unpack(folder, own.aside, publication, skip, int(max_gb * 1e9))
    published = _audited(folder, unpacked, publication, run, rows, own, asks.seed)
    count, whole = len(publication.files) - len(skip), len(publication.files)
    text = f"{count}{'' if count == whole else f' of {whole}'} files as published"
    claims = [PublicClaim("files", "proven", text, {"count": count})]
    with closing(published.setup.programs.steps):
        for stage in STAGES:
            claims += import_module(f"{again.__name__}.{stage}").again(published)
    why_not = ["bits could not be compared"] if published.why is not None else []
    why_not += published.draw.why_not_verified(len(published.chosen))
    if not published.same_release:
        why_not.append(f"release {brief(publication.release)} wrote it, and this is {__version__}")
    return Verified(published.why is None, in_order(claims), why_not)


def _audited(
    folder: Path,
    unpacked: Unpacked,
    publication: Publication,
    run: runfile.Run,
    rows: list[str],
    own: Own,
    seed: str | None,
) -> PublishedRun:
    """Audit the header and every round, with all messages that are published.

    `rows` names the rows of the windows to repeat; `seed` is the reader's, or None.

    Raises:
      LockstepError: The transcript contradicts itself or the run file, or is not whole.
    """
    weights = folder if run.export.dtype == "float32" else None
    found = PublishedTranscript(unpacked.folder, weights)
    header, entries, total = found.header, found.rounds, run.config.total_steps
    if publication.rounds != found.hash:
        raise LockstepError(
            f"{MANIFEST}: rounds is {publication.rounds[:12]}, expected {found.hash[:12]} of "
            f"{TRANSCRIPT}/rounds.jsonl"
        )
    start = entries[0].round.step - 1 if entries else -1
    if start < 0 or len(entries) != total - start:
        raise LockstepError(
            f"{TRANSCRIPT}/rounds.jsonl: {len(entries)} rounds, expected all of {total}"
        )
    model_file = subject_of_model(header.model).model_file
    if model_file not in publication.files:
        raise LockstepError(f"{MANIFEST}: lists no {model_file}, expected what {HEADER} says")
    subject_of(run).check_model(run, header.model, HEADER)
    columns, bound = publication.columns, subject_of(run).vocab_size(header.model)
    given = [given_rows.read(folder / name, columns, run, bound) for name in rows]
    index = entries[0].round.data_index
    setup = begin.blank(run, header.model, given_rows.joined(given), columns, start, index)
    due, kept = run.snapshots(start), setup.programs.form.kept
    check_sketched(header, kept=kept)
    if found.snapshots != due.steps:
        raise LockstepError(
            f"{TRANSCRIPT}/snapshots: after rounds {found.snapshots}, expected after {due.steps}"
        )
    beacon = read_beacon(run.witness.beacon)
    drawn_with = draws.seed_of(found, publication.seed, beacon)
    drawn = draws.draw(found, due.windows, drawn_with, publication.windows, kept)
    records.check_transcript(publication, found, drawn, run, kept=kept)
    audited = None if kept else [one.window for one in drawn]
    findings = audit_header(setup, found) + audit_rounds(setup, found, audited)
    refuse(contradictions(findings))
    made = records.check_made(folder, publication, found, unpacked)
    possible = len(draws.possible(found, due.windows, kept))
    draw = _draw(publication, seed, len(drawn), possible, len(rows), beacon)
    files = {name: file.sha256 for name, file in publication.files.items()}
    chosen = [one for one in drawn if draws.name(one, kept) in rows]
    return PublishedRun(
        folder, files, own, setup, found, due.windows, chosen, rows, findings, draw, made,
        publication.release,
    )  # fmt: skip


def _draw(
    publication: Publication,
    seed: str | None,
    among: int,
    total: int,
    count: int,
    beacon: Beacon | None,
) -> Draw:
    """Return who drew `count` windows, among how many; refuse a seed that would draw nothing."""
    if seed not in (None, publication.seed) and not count < among and among != total:
        raise RequestError(
            f"--seed: {MANIFEST} has {among} of {total} windows, expected more than {count} to "
            f"draw from; ask the author for `publish --windows {total}`"
        )
    if seed is not None:
        seed_of = "asked" if seed == publication.seed else "reader"
    elif publication.seed is not None:
        seed_of = "author"
    else:
        seed_of = "hash" if beacon is None else "beacon"
    return Draw(among, total, seed_of, beacon.text if beacon else None)


def check_sketched(header: Header, *, kept: bool) -> None:
    """Check that messages that are not kept have sketches: without, none could be compared.

    Raises:
      LockstepError: The header says otherwise, as a transcript of release 0.2.
    """
    if not kept and not header.sketched:
        raise LockstepError(
            f"{HEADER}: sketched is false, expected true, since messages as large as these are not "
            "kept"
        )
