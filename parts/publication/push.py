"""`lockstep push`: uploads an accepted export to the hub or a bucket, for others to load."""

from collections.abc import Iterable
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.transcript.transcript import Transcript
from parts.publication import aside, publish
from parts.publication.checks.outcome import PUBLISHED_WINDOWS
from pipeline import runfile
from pipeline.runfile.importer import toml
from pipeline.runfile.psyche import DESTINATION_FORM, destination
from pipeline.stage import lock
from pipeline.stage.artifacts import Paths
from pipeline.subject import subject_of_model
from pipeline.weights import upload


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

    Raises:
      LockstepError: A destination is invalid or missing, the run has no current export, the audit
        or a server refused it.
    """
    if key is not None and not with_proof:
        raise LockstepError("--sign: expected --with-proof too, of which the signature is a part")
    named = [*destinations, *runfile.load(run).config.checkpointers]
    if not named:
        raise LockstepError(
            f"{run}: [config] checkpointers names no destination, and neither does the command; "
            f"expected {DESTINATION_FORM}"
        )
    checkpoints = {name: destination(name) for name in named}
    for name, checkpoint in checkpoints.items():
        if checkpoint is None:
            raise LockstepError(f"{name!r}: expected {DESTINATION_FORM}")
    paths = Paths("report", run, root)
    with aside.folder(root / "data" / "runs", "push") as place:
        published = place / "publication"
        if with_proof:
            publish.write(published, run, root, PUBLISHED_WINDOWS, None, key)
        with lock.hold(root / "data" / ".export.lock"):  # the stage cannot replace it meanwhile
            files = _by_name(publish.with_results(publish.accepted(paths), paths), paths)
            if with_proof:
                proof = sorted(path for path in published.rglob("*") if path.is_file())
                files = {path.relative_to(published).as_posix(): path for path in proof}
            transcript = Transcript(paths.need("train") / "transcript")
            last, key = transcript.rounds[-1].round, paths.keys.key("train")
            for name, checkpoint in checkpoints.items():
                loaded = upload.push(
                    checkpoint, files, step=last.step, epoch=last.epoch, run=key, private=private
                )
                how = f"in [model.LLM], checkpoint = {toml(loaded)}"
                model = transcript.header.model
                if subject_of_model(model).code(model) is not None:
                    how = f"{subject_of_model(model).model_file} says what its params are"
                print(f"push: {name} has step {last.step} of run {key}; {how}")


def _by_name(files: Iterable[Path], paths: Paths) -> dict[str, Path]:
    """Return files by their names in the export; the card may be the report's."""
    export = paths.out("export")
    return {
        file.relative_to(export).as_posix() if file.is_relative_to(export) else file.name: file
        for file in files
    }
