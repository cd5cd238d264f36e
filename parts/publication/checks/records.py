"""Whether the files of a publication are those that the stages left, and those that it needs."""

from pathlib import Path

from lockstep.errors import LockstepError, brief
from lockstep.files import sha256_file
from lockstep.transcript.transcript import Transcript
from parts.publication import draws, layout, packed
from parts.publication.checks.transcript import Unpacked, files
from parts.publication.draws import DrawnWindow
from parts.publication.layout import Publication
from pipeline import runfile
from pipeline.again import outputs
from pipeline.again.outputs import TRANSCRIPT, Made, PublishedFile
from pipeline.stage.keys import STAGES, digest, needs


def check_made(
    folder: Path, publication: Publication, transcript: Transcript, unpacked: Unpacked
) -> dict[str, Made]:
    """Check that the stages read each other's results, and left the published files; return these.

    Raises:
      LockstepError: A made file is missing or damaged, or says something else.
    """
    stages = [stage for stage in STAGES if layout.made(stage) in publication.files]
    made = {stage: layout.read_made(folder, stage) for stage in stages}
    for stage, file in made.items():
        for need in needs(stage):
            if file.needs.get(need) != sha256_file(folder / layout.made(need)):
                raise LockstepError(
                    f"{layout.made(stage)}: read another {layout.made(need)}, expected this one"
                )
        _check_key(stage, made)
    if made["train"].key != transcript.header.key:
        raise LockstepError(
            f"{outputs.HEADER}: key {transcript.header.key}, expected {made['train'].key} as "
            f"{layout.made('train')} says"
        )
    left = _left(made)
    here = {f"{TRANSCRIPT}/{name}": file for name, file in unpacked.files.items()}
    here |= {name: publication.files[name] for name in layout.RECORDS} | publication.exported
    for name, file in here.items():
        stage, expected = left.get(name, (_maker(name), None))
        if expected != file:
            raise LockstepError(
                f"{name}: sha256 {file.sha256[:12]}, expected what {layout.made(stage)} says"
            )
    exported = {name for name, (stage, _) in left.items() if stage == "export"}
    if missing := sorted(exported - publication.exported.keys()):
        raise LockstepError(
            f"{missing[0]}: not published, expected it as {layout.made('export')} says"
        )
    return made


def _left(made: dict[str, Made]) -> dict[str, tuple[str, PublishedFile]]:
    """The stages' files in a publication: by published name, the stage and the file.

    Of an export that a user's own code wrote too, the other files are not published.
    """
    files, found = made["export"].files, {}
    only = next((names for model, names in outputs.EXPORTS.items() if model in files), None)
    for stage, file in made.items():
        for name, one in file.files.items():
            output = outputs.find(stage, name)
            if output is None or (stage == "export" and only is not None and name not in only):
                continue
            if (published := output.name(name)) is not None:
                found[published] = stage, one
    return found


def _maker(name: str) -> str:
    """The stage that leaves a published file."""
    for stage, every in outputs.OUTPUTS.items():
        if any(one.published == name for one in every):
            return stage
    return "train" if name.startswith(TRANSCRIPT) else "export"


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
    listed = {name for name in publication.files if name.startswith(f"{TRANSCRIPT}/")}
    due = {
        f"{TRANSCRIPT}/{packed.name_of(name)}"
        for name in files(transcript, published, run, kept=kept)
    }
    listed |= set(publication.row_files)
    due |= {draws.name(one, kept) for one in published}
    if missing := sorted(due - listed):
        raise LockstepError(
            f"{missing[0]}: no such file, expected it, since a drawn window needs it"
        )
    if useless := sorted(listed - due):
        raise LockstepError(f"{useless[0]}: a file that no drawn window needs, expected none")
    extents: dict[str, list[tuple[int, int]]] = {}
    for entry in transcript.rounds:
        for message in (*entry.evidence.messages.values(), *entry.evidence.others.values()):
            if message.payload is not None and message.offset is not None:
                extents.setdefault(message.payload, []).append((message.offset, message.held))
    for payload, parts in extents.items():
        name, end = f"{TRANSCRIPT}/payloads/{payload}", 0
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
