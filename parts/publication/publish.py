"""`lockstep publish` and `push`: an accepted export, with what others need to check it."""

import functools
import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from lockstep import __version__
from lockstep.errors import LockstepError, hide
from lockstep.files import read_json, sha256_file, write_bytes, write_json, write_text
from lockstep.machine.progress import Progress, size
from lockstep.transcript.transcript import Transcript
from parts.publication import layout, signature, temporary_folder
from parts.publication import transcript as published_transcript
from parts.publication.claims import PUBLISHED_WINDOWS
from parts.publication.layout import Publication
from pipeline import runfile, version
from pipeline.audit import rows_file
from pipeline.audit.sample import read_beacon
from pipeline.language_model import held_out
from pipeline.pages.card import with_commit
from pipeline.recheck import outputs
from pipeline.recheck.outputs import CARD, EXPORTS, HELD_OUT, RUN
from pipeline.runfile.as_text import toml
from pipeline.runfile.psyche import DESTINATION_FORM, destination
from pipeline.stage import lock, signals
from pipeline.stage.artifacts import COUNTED, Paths, verify
from pipeline.stage.keys import STAGES
from pipeline.start import set_up
from pipeline.subject import subject_of, subject_of_model
from pipeline.tokens.shards import read_shards
from pipeline.weights import hf, upload


def show(
    folder: Path, run: Path, root: Path, windows: int, seed: str | None, key: Path | None
) -> None:
    """Publish a run into a folder, and print its size.

    `windows` windows are drawn with `seed`, from a reader whom the author could not foresee, or
    None. `key` is the file of the private key that signs, or None.
    """
    publication, total = write(folder, run, root, windows, seed, key)
    export = sum(file.bytes for file in publication.exported.values())
    if publication.commit is None:
        print(f"publish: {folder} states no commit: the source is in no git checkout, or changed")
    print(
        f"publish: {folder} has {len(publication.files)} files, {size(publication.size)}: "
        f"{size(export)} of the export and {size(publication.size - export)} to check it with; "
        f"lockstep verify {shlex.quote(str(folder))}"
    )
    if (count := len(publication.row_files)) < total:
        print(
            f"publish: readers can draw among {count} of {total} windows, which you chose, so "
            f"`verify` says consistent; for verified: publish --windows {total}"
        )


def write(
    folder: Path, run: Path, root: Path, windows: int, seed: str | None, key: Path | None = None
) -> tuple[Publication, int]:
    """Write the publication of a run's export; arguments as for `show`.

    Return it, and how many windows of the run could have been drawn.
    """
    folder = Path(os.path.realpath(folder))  # what replaces it has to be beside its end
    if os.path.lexists(folder) and not folder.is_dir():
        raise LockstepError(f"{folder}: not a folder, expected a new or an empty one")
    if key is not None:
        signature.check_private(key)  # before there is anything to sign
    paths, settings = Paths("report", run, root), runfile.load(run)
    _check_public(settings, run)
    unfinished = folder.with_name(f".{folder.name}.part")
    clean = functools.partial(shutil.rmtree, unfinished, ignore_errors=True)
    cleaning = signals.cleaning(clean, "the same command begins again")
    # so that the stage cannot replace the export meanwhile, and no other publish fills the folder
    with lock.hold(root / "data" / ".export.lock"), cleaning:
        if folder.is_dir() and any(folder.iterdir()):
            raise LockstepError(f"{folder}: has files, expected a new or an empty folder")
        clean()  # left by a kill
        publication, total = _write(unfinished, settings, paths, windows, seed)
        if key is not None:
            digests = {name: file.sha256 for name, file in publication.files.items()}
            digests[layout.MANIFEST] = sha256_file(unfinished / layout.MANIFEST)
            write_bytes(unfinished / layout.SIGNATURE, signature.sign(digests, folder.name, key))
        os.replace(unfinished, folder)  # or an empty folder's
    return publication, total


def _write(
    folder: Path, settings: runfile.Run, paths: Paths, windows: int, seed: str | None
) -> tuple[Publication, int]:
    """Write a publication of a run, without a signature."""
    exported = accepted(paths)
    _check_comparable(paths)
    only = EXPORTS.get(subject_of(settings).exports.model_file)
    exported = {name: file for name, file in exported.items() if not only or name in only}
    folder.parent.mkdir(parents=True, exist_ok=True)
    for name, file in exported.items():
        _copy(file, folder / name)
    if (commit := version.commit()) is not None:
        state_commit(folder / CARD, exported[CARD], commit)
    fields, total = _write_proof(folder, settings, paths, windows, seed, only)
    publication = Publication(
        format=layout.FORMAT,
        release=__version__,
        seed=seed,
        commit=commit,
        **fields,
        files={
            path.relative_to(folder).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": sha256_file(path),
            }
            for path in sorted(path for path in folder.rglob("*") if path.is_file())
        },
    )
    layout.check(publication, str(folder))  # others would refuse it
    write_text(folder / layout.MANIFEST, publication.model_dump_json(indent=1) + "\n")
    return publication, total


def public(run: runfile.Run) -> dict[str, Any]:
    """Return the run file to publish: from `[runtime]`, only what other tables rest on."""
    runtime = runfile.Runtime(**{key: getattr(run.runtime, key) for key in run.runtime.told})
    return run.model_copy(update={"runtime": runtime}).model_dump(mode="json")


def _check_public(run: runfile.Run, path: Path) -> None:
    """Refuse to publish a run whose transcript shows a secret, or that nobody else could repeat."""
    tables = run.model_dump(mode="json", exclude={"runtime"})  # which its header holds
    for text in jax.tree.leaves(tables):
        if isinstance(text, str) and "://" in text and hide(text) != text:
            raise LockstepError(
                f"{path}: {hide(text)} has a user, a password or a query, which the transcript "
                "would show to everybody; expected an address without them"
            )
    subject_of(run).check_public(run, path)
    if run.runtime.begins_late:
        raise LockstepError(
            f"{path}: runtime.from_state is true, expected false to publish, since the first "
            "rounds are missing"
        )


def _write_proof(
    folder: Path,
    run: runfile.Run,
    paths: Paths,
    count: int,
    seed: str | None,
    only: tuple[str, ...] | None,
) -> tuple[dict[str, Any], int]:
    """Write all of a publication's proof/ but its list; `only` are the export's files, if any.

    Returns:
      What the list says of the run, and how many windows can be drawn.
    """
    write_json(folder / RUN, public(run))
    for stage in STAGES:
        if stage == layout.REPORT and not paths.is_made(stage):
            continue
        made = paths.made(stage)
        record = verify(made, [CARD] if stage == layout.REPORT else None)
        _copy(made, folder / layout.made(stage))
        for name in record["files"]:
            if stage == "export" and only is not None and name not in only:
                continue
            published = outputs.need(stage, name).name(name)
            if published in layout.RECORDS:
                _copy(made.parent / name, folder / published)

    transcript, shards = Transcript(paths.out("train") / "transcript"), paths.out("download")
    start = transcript.rounds[0].round.step - 1
    model, columns = transcript.header.model, read_shards(shards).columns
    data = set_up.rows(run, model, shards)
    setup = set_up.blank(run, model, data, columns, start, 0)
    kept, show_own = setup.programs.form.kept, setup.settings.reports.show_own
    seed = layout.seed_of(transcript, seed, read_beacon(run.witness.beacon))
    windows = run.snapshots(start).windows
    published = layout.draw(transcript, windows, seed, count, kept=kept, show_own=show_own)
    names = sorted(published_transcript.files(transcript, published, run, kept=kept))
    with Progress("publish", total=len(names) + len(published), unit="file") as bar:
        for name in names:
            target = folder / outputs.TRANSCRIPT / layout.packed_name(name)
            if target.name == Path(name).name:
                _copy(transcript.folder / name, target)
            else:
                published_transcript.pack(transcript.folder / name, target)
            bar.advance()
        for drawn in published:
            indices = rows_file.assigned(transcript.window(drawn.window), drawn.peers)
            rows_file.write(folder / layout.row_file(drawn, kept), data, indices)
            bar.advance()
    held = held_out.read(run, shards)
    if len(held.rows_NW):
        rows = rows_file.GivenRows(HELD_OUT, held.indices_N, held.rows_NW)
        rows_file.write(folder / HELD_OUT, rows, held.indices_N)
    if (counted := subject_of(run).counted_rows(run, model, shards)) is not None:
        rows_file.write(folder / COUNTED, rows_file.GivenRows(COUNTED, *counted), counted[0])
    record = {"columns": columns, "rounds": transcript.hash, "windows": len(published)}
    return record, len(layout.possible(transcript, windows, kept))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def _check_comparable(paths: Paths) -> None:
    path = paths.out("witness") / "verdict.json"
    if (why := read_json(path)["not_comparable"]) is not None:
        raise LockstepError(
            f"{path}: not_comparable is {why!r}, expected null: an audit that compared all windows "
            "that it drew"
        )


# ---- The export ----


def accepted(paths: Paths) -> dict[str, Path]:
    """Return the files to publish of a run's accepted export by name, checked by their hashes.

    With the report's card, if there is one.
    """
    folder = paths.need("export")
    if why := hf.why_refused(folder):
        raise LockstepError(
            f"{folder / hf.REFUSED}: {why}; expected an export that the witness accepted"
        )
    made = paths.root / paths.keys.made("export")
    files = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != made.name
    }
    if paths.is_made(layout.REPORT):
        verify(paths.made(layout.REPORT), [CARD])
        files[CARD] = paths.out(layout.REPORT) / CARD
    return files


def state_commit(path: Path, card: Path, commit: str) -> None:
    """Write a stage's published card to another path, with the commit of the source."""
    write_text(path, with_commit(card.read_text(encoding="utf-8"), commit))


# ---- Push ----


def push(
    run: Path,
    root: Path,
    destinations: Iterable[str],
    *,
    private: bool,
    with_proof: bool = False,
    key: Path | None = None,
) -> None:
    """Push a run's export, and print how to load it from each destination.

    The run file's `[config] checkpointers` are destinations too. With `with_proof` a repository
    gets what others need to check it, as `lockstep publish` writes it, signed with a private `key`
    if there is one.
    """
    if key is not None and not with_proof:
        raise LockstepError("--sign: expected --with-proof too, of which the signature is a part")
    names = [*destinations, *runfile.load(run).config.checkpointers]
    if not names:
        raise LockstepError(
            f"{run}: [config] checkpointers names no destination, and neither does the command; "
            f"expected {DESTINATION_FORM}"
        )
    checkpoints = {name: destination(name) for name in names}
    for name, checkpoint in checkpoints.items():
        if checkpoint is None:
            raise LockstepError(f"{name!r}: expected {DESTINATION_FORM}")
    on_hub = any(isinstance(where, runfile.CheckpointHub) for where in checkpoints.values())
    if (private or with_proof) and not on_hub:
        option = "--private" if private else "--with-proof"
        raise LockstepError(f"{option}: expected a repository on the hub, found {', '.join(names)}")
    paths = Paths("report", run, root)
    with temporary_folder.folder(root / "data" / "runs", "push") as place:
        published = place / "publication"
        if with_proof:
            write(published, run, root, PUBLISHED_WINDOWS, None, key)
        with lock.hold(root / "data" / ".export.lock"):  # the stage cannot replace it meanwhile
            files = accepted(paths)
            if with_proof:
                proof = sorted(path for path in published.rglob("*") if path.is_file())
                files = {path.relative_to(published).as_posix(): path for path in proof}
            elif (commit := version.commit()) is not None:
                state_commit(place / CARD, files[CARD], commit)
                files[CARD] = place / CARD
            transcript = Transcript(paths.need("train") / "transcript")
            last, train = transcript.rounds[-1].round, paths.keys.key("train")
            for name, checkpoint in checkpoints.items():
                loaded = upload.push(
                    checkpoint, files, step=last.step, epoch=last.epoch, run=train, private=private
                )
                how = f"in [model.LLM], checkpoint = {toml(loaded)}"
                model = transcript.header.model
                if subject_of_model(model).code(model) is not None:
                    how = f"{subject_of_model(model).exports.model_file} says what its params are"
                print(f"push: {name} has step {last.step} of run {train}; {how}")
