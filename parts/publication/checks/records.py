"""Whether the records of a publication agree: made files, card and verdict, with all the rest."""

from pathlib import Path

from lockstep.errors import LockstepError, brief
from lockstep.files import sha256_file
from lockstep.machine.progress import size
from lockstep.programs.train_step import Programs
from lockstep.tables.explain import validate_json
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from parts.publication import drawn, layout, packed
from parts.publication.accepted_export import CARD
from parts.publication.checks import results
from parts.publication.checks.results import Evaluated
from parts.publication.checks.start_of_chain import is_given
from parts.publication.drawn import DrawnWindow, files
from parts.publication.layout import Made, Publication, PublishedFile
from parts.publication.unpacked import Unpacked
from pipeline import runfile
from pipeline.audit import sample
from pipeline.audit.tolerance import how
from pipeline.audit.verdict import Verdict, judge
from pipeline.stage.artifacts import METRICS
from pipeline.stage.keys import digest, needs

MOST_CARD_BYTES = 2**20  # it is parsed


def check_made(
    folder: Path, publication: Publication, transcript: Transcript, unpacked: Unpacked
) -> dict[str, Made]:
    """Check that the stages read each other's results, and left the published files; return these.

    Raises:
      LockstepError: A made file is missing or damaged, or says something else.
    """
    stages = [*layout.STAGES, *([layout.REPORT] if is_reported(publication) else [])]
    paths = {stage: folder / layout.made(stage) for stage in stages}
    made = {stage: layout.read_made(folder, stage) for stage in stages}
    for stage, file in made.items():
        for need in needs(stage):
            if file.needs.get(need) != sha256_file(paths[need]):
                raise LockstepError(
                    f"{layout.made(stage)}: read another {layout.made(need)}, expected this one"
                )
        _check_key(stage, made)
    if made["train"].key != transcript.header.key:
        raise LockstepError(
            f"{layout.TRANSCRIPT}/header.json: key {transcript.header.key}, expected "
            f"{made['train'].key} as {layout.made('train')} says"
        )
    for original, file in unpacked.files.items():
        name = f"{layout.TRANSCRIPT}/{original}"
        _check_left(name, file, made["train"], f"transcript/{original}", "train")
    left = {
        layout.VERDICT: ("witness", "verdict.json"),
        layout.EVALUATED: ("evaluate", f"{METRICS}/evaluate.json"),
        layout.RESULTS: ("evaluate", "evaluate.json"),
        layout.SHARDS: ("download", "shards.json"),
        layout.SOURCE: ("convert", "source.json"),
    }
    for name, (stage, original) in left.items():
        _check_left(name, publication.files[name], made[stage], original, stage)
    for name, file in publication.exported.items():
        stage = layout.REPORT if name == CARD and is_reported(publication) else "export"
        _check_left(name, file, made[stage], name, stage)
    left_out = made["export"].files.keys() - publication.exported.keys()
    if publication.is_workload:  # what its own code wrote is not published
        left_out &= set(layout.WORKLOADS)
    for name in left_out:
        raise LockstepError(f"{name}: not published, expected it as {layout.made('export')} says")
    return made


def _check_key(stage: str, made: dict[str, Made]) -> None:
    """Check that what a stage says that its key digests has its tables, and the keys it needs."""
    said = made[stage]
    due = {f"[{table}]": digest(value) for table, value in said.tables.items()}
    due |= {f"stage {need}": made[need].key for need in needs(stage)}
    for name, value in due.items():
        if said.content.get(name, value) != value:
            raise LockstepError(
                f"{layout.made(stage)}: content of {brief(name)} is "
                f"{brief(said.content[name])[:12]}, expected {value[:12]}"
            )


def check_transcript(
    publication: Publication,
    transcript: Transcript,
    published: list[DrawnWindow],
    run: runfile.Run,
    *,
    kept: bool,
) -> None:
    """Check that a published transcript holds what the published windows need, and nothing else.

    Raises:
      LockstepError: A file is missing or of no use, or holds something else than messages.
    """
    place = f"{layout.TRANSCRIPT}/"
    listed = {name for name in publication.files if name.startswith(place)}
    given = is_given(run)
    due = {
        f"{place}{packed.name_of(name)}"
        for name in files(transcript, published, run, kept=kept, given=given)
    }
    listed |= set(publication.row_files)
    due |= {drawn.name(one, kept) for one in published}
    for name in sorted(due ^ listed):
        found, expected = "a file that no drawn window needs", "none"
        if name in due:
            found, expected = "no such file", "it, since a drawn window needs it"
        raise LockstepError(f"{name}: {found}, expected {expected}")
    extents: dict[str, list[tuple[int, int]]] = {}
    for entry in transcript.rounds:
        for message in (*entry.evidence.messages.values(), *entry.evidence.others.values()):
            if message.payload is not None and message.offset is not None:
                extents.setdefault(message.payload, []).append((message.offset, message.held))
    for payload, parts in extents.items():
        name, end = f"{place}payloads/{payload}", 0
        if name not in listed:
            continue
        for offset, count in sorted(parts):
            if offset != end:
                raise LockstepError(f"{name}: a message at {offset}, expected one at {end}")
            end += count
        if publication.files[name].bytes != end:
            raise LockstepError(
                f"{name}: {publication.files[name].bytes} bytes, expected the {end} of its messages"
            )


def is_reported(publication: Publication) -> bool:
    """Whether the card is that of stage report, with results."""
    return layout.made(layout.REPORT) in publication.files


def _check_left(name: str, file: PublishedFile, made: Made, original: str, stage: str) -> None:
    if made.files.get(original) != file:
        raise LockstepError(
            f"{name}: sha256 {file.sha256[:12]}, expected what {layout.made(stage)} says"
        )


def check_card(
    folder: Path, publication: Publication, transcript: Transcript, evaluated: Evaluated
) -> None:
    """Check that the model card names the weights and the transcript, and has the results.

    These are named by their SHA-256. `card_again` checks the rest of its text.

    Raises:
      LockstepError: It names others, or has other results.
    """
    if publication.files[CARD].bytes > MOST_CARD_BYTES:
        raise LockstepError(
            f"{CARD}: {size(publication.files[CARD].bytes)}, expected at most "
            f"{size(MOST_CARD_BYTES)} of a model card"
        )
    try:
        text = (folder / CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LockstepError(f"{CARD}: {error}, expected a model card") from error
    named = {
        name: file.sha256
        for name, file in publication.exported.items()
        if name.endswith(".safetensors")
    }
    for name, sha256 in (named | {"the transcript's rounds": transcript.hash}).items():
        if sha256 not in text:
            raise LockstepError(
                f"{CARD}: another SHA-256 of {name}, expected {sha256[:12]} as it is here"
            )
    results.check(text, evaluated if is_reported(publication) else None)


def read_verdict(folder: Path) -> Verdict:
    """Return the published verdict, which accepts the run.

    Raises:
      LockstepError: It is no verdict, or refuses the run.
    """
    path = folder / layout.VERDICT
    verdict = validate_json(Verdict, path.read_bytes(), layout.VERDICT)
    if not verdict.accepted:
        raise LockstepError(f"{layout.VERDICT}: accepted is false, expected an accepted run")
    return verdict


def check_verdict(
    verdict: Verdict,
    run: runfile.Run,
    transcript: Transcript,
    windows: list[Window],
    programs: Programs,
) -> None:
    """Check that a verdict is what its own findings and the audited transcript come to.

    Raises:
      LockstepError: A field is another.
    """
    kept, why = programs.form.kept, verdict.why_not_bitwise
    exact = not why or (kept and not programs.unruled)
    compared = how(run, why, exact, verdict.repeats, verdict.varied)
    replayed = sample.draw(run, windows, sample.seed_of(run, transcript), kept)
    expected = judge(run, transcript, verdict.findings, compared, windows, replayed)
    for name in Verdict.model_fields:
        found, due = getattr(verdict, name), getattr(expected, name)
        if found != due:
            raise LockstepError(
                f"{layout.VERDICT}: {name} is {brief(str(found))}, expected {brief(str(due))}, "
                "which follows from its findings, the run file and the transcript"
            )
