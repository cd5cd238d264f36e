"""`lockstep publish FOLDER`: an accepted export with what others need to check it."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep import __version__
from lockstep.errors import LockstepError, hide
from lockstep.files import sha256_file, write_bytes, write_json, write_text
from lockstep.machine.progress import size
from lockstep.transcript.transcript import Transcript
from parts.publication import draws, layout, packed, signature
from parts.publication.checks import transcript as published_transcript
from parts.publication.layout import Publication
from pipeline import runfile
from pipeline.again import outputs
from pipeline.again.outputs import CARD, EXPORTS, HELD_OUT, RUN
from pipeline.audit import given_rows
from pipeline.audit.sample import read_beacon
from pipeline.language_model import held_out
from pipeline.stage import lock
from pipeline.stage.artifacts import Paths, verify
from pipeline.stage.keys import STAGES
from pipeline.start import begin
from pipeline.subject import subject_of
from pipeline.tokens.shards import read_shards
from pipeline.weights import hf


class Written(NamedTuple):
    """A publication that was written, and how many windows of its run could have been drawn."""

    publication: Publication
    windows: int


class _Proof(NamedTuple):
    """What the list needs once everything else below proof/ is written.

    Attributes:
      columns: Columns of the data's rows.
      rounds: SHA-256 of rounds.jsonl.
      windows: How many windows can be drawn.
    """

    columns: tuple[str, ...]
    rounds: str
    windows: int


def show(
    folder: Path, run: Path, root: Path, windows: int, seed: str | None, key: Path | None
) -> None:
    """Publish a run into a folder, and print what it takes.

    So many `windows` are drawn, with the `seed` that a reader asked for, whom the author could not
    foresee; or None. `key` is the file of the private key that signs, or None.
    """
    publication, total = write(folder, run, root, windows, seed, key)
    export = sum(file.bytes for file in publication.exported.values())
    print(
        f"publish: {folder} has {len(publication.files)} files, {size(publication.size)}: "
        f"{size(export)} of the export and {size(publication.size - export)} to check it with; "
        f"lockstep verify {folder}"
    )
    count = len(publication.row_files)
    if count < total:
        print(
            f"publish: readers can draw among {count} of {total} windows, which you chose, so "
            f"`verify` says consistent; for verified: publish --windows {total}"
        )


def write(
    folder: Path, run: Path, root: Path, windows: int, seed: str | None, key: Path | None = None
) -> Written:
    """Write the publication of a run's export; arguments as for `show`.

    Raises:
      LockstepError: The folder is not empty, a stage has no current result, the audit refused the
        export, an address of the run file has a secret, or the key is none.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise LockstepError(f"{folder}: has files, expected a new or an empty folder")
    if key is not None:
        signature.check_private(key)  # before there is anything to sign
    paths, settings = Paths("report", run, root), runfile.load(run)
    _check_public(settings, run)
    _check_repeatable(settings, run)
    with lock.hold(root / "data" / ".export.lock"):  # so that the stage cannot replace it meanwhile
        exported = with_results(accepted(paths), paths)
        only = EXPORTS.get(subject_of(settings).model_file)
        if only is not None:
            exported = [file for file in exported if file.name in only]
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(aside, ignore_errors=True)
        _copy((file, aside / file.name) for file in exported)
        proof = _write_proof(aside, settings, paths, windows, seed, only)
    files = sorted(path for path in aside.rglob("*") if path.is_file())
    publication = Publication(
        format=2,
        release=__version__,
        rounds=proof.rounds,
        windows=windows,
        seed=seed,
        columns=proof.columns,
        files={
            path.relative_to(aside).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": sha256_file(path),
            }
            for path in files
        },
    )
    layout.check(publication, str(aside))  # others would refuse it
    write_text(aside / layout.MANIFEST, publication.model_dump_json(indent=1) + "\n")
    if key is not None:
        digests = {name: file.sha256 for name, file in publication.files.items()}
        digests[layout.MANIFEST] = sha256_file(aside / layout.MANIFEST)
        signed = signature.sign(digests, folder.resolve().name, key)
        write_bytes(aside / layout.SIGNATURE, signed)
    if folder.is_dir():
        folder.rmdir()
    os.replace(aside, folder)
    return Written(publication, proof.windows)


def public(run: runfile.Run) -> dict[str, Any]:
    """Return a run file for others: of `[runtime]` only the carrier, which `[links]` depends on."""
    runtime = runfile.Runtime(carrier=run.runtime.carrier)
    return run.model_copy(update={"runtime": runtime}).model_dump(mode="json")


def _check_public(run: runfile.Run, path: Path) -> None:
    """Refuse a run whose transcript shows a secret: its header holds the tables as they are."""
    for text in _strings(run.model_dump(mode="json", exclude={"runtime"})):
        if "://" in text and hide(text) != text:
            raise LockstepError(
                f"{path}: {hide(text)} has a user, a password or a query, which the transcript "
                "would show to everybody; expected an address without"
            )


def _check_repeatable(run: runfile.Run, path: Path) -> None:
    """Refuse a run of a workload that nobody else could repeat from what is published."""
    if run.workload.inner == "command":
        raise LockstepError(
            f"{path}: workload.inner is 'command', expected another to publish: nobody runs a "
            "stranger's command"
        )
    if isinstance(run.llm.data_location, runfile.DataFiles):
        raise LockstepError(
            f"{path}: {runfile.variant_name(run.llm.data_location)}: rows are names of files, "
            "which a publication does not hold; expected tokens or arrays to publish"
        )


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for inner in value.values():
                yield from _strings(inner)
        case list():
            for inner in value:
                yield from _strings(inner)


def _write_proof(
    folder: Path,
    run: runfile.Run,
    paths: Paths,
    count: int,
    seed: str | None,
    only: tuple[str, ...] | None,
) -> _Proof:
    """Write all below proof/ but its list; of the export `only` some files count, if not None."""
    write_json(folder / RUN, public(run))
    for stage in STAGES:
        if stage == layout.REPORT and not paths.is_made(stage):
            continue
        made = paths.made(stage)
        said = verify(made, [CARD] if stage == layout.REPORT else None)
        _copy([(made, folder / layout.made(stage))])
        for name in said["files"]:
            if stage == "export" and only is not None and name not in only:
                continue
            published = outputs.need(stage, name).name(name)
            if published in layout.RECORDS:
                _copy([(made.parent / name, folder / published)])

    transcript, shards = Transcript(paths.out("train") / "transcript"), paths.out("download")
    start = transcript.rounds[0].round.step - 1
    model, columns = transcript.header.model, read_shards(shards).columns
    data = begin.rows(run, model, shards)
    kept = begin.blank(run, model, data, columns, start, 0).programs.form.kept
    seed = draws.seed_of(transcript, seed, read_beacon(run.witness.beacon))
    every = run.snapshots(start).windows
    published = draws.draw(transcript, every, seed, count, kept)
    for name in published_transcript.files(transcript, published, run, kept=kept):
        target = folder / outputs.TRANSCRIPT / packed.name_of(name)
        if target.name == Path(name).name:
            _copy([(transcript.folder / name, target)])
        else:
            packed.pack(transcript.folder / name, target)

    for one in published:
        indices = given_rows.assigned(transcript.window(one.window), one.peers)
        given_rows.write(folder / draws.name(one, kept), data, indices)
    held = held_out.read(run, shards)
    if len(held.rows_NW):
        rows = given_rows.GivenRows(HELD_OUT, held.indices_N, held.rows_NW)
        given_rows.write(folder / HELD_OUT, rows, held.indices_N)
    return _Proof(columns, transcript.hash, len(draws.possible(transcript, every, kept)))


def _copy(pairs: Iterable[tuple[Path, Path]]) -> None:
    for source, target in pairs:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


# ---- The export ----


def accepted(paths: Paths) -> list[Path]:
    """Return the files of a run's export, checked against their hashes.

    Raises:
      LockstepError: There is no current export, or the witness refused it.
    """
    folder = paths.need("export")
    if why := hf.why_refused(folder):
        raise LockstepError(
            f"{folder / hf.REFUSED}: {why}; expected an export that the witness accepted"
        )
    made = paths.root / paths.keys.made("export")
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != made.name)


def with_results(files: list[Path], paths: Paths) -> list[Path]:
    """Return the files of an export, with the report's card, which has results, if there is one."""
    if not paths.is_made("report"):
        return files
    verify(paths.made("report"), [CARD])
    card, own = paths.out("report") / CARD, paths.out("export") / CARD
    return [card if file == own else file for file in files]
