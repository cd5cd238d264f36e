"""`lockstep push`: uploads an accepted export to the hub or a bucket, for others to load."""

from collections.abc import Iterable
from pathlib import Path

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.pages import summary
from pipeline.publication.exported import accepted
from pipeline.runfile.importer import toml
from pipeline.runfile.psyche import DESTINATION_FORM, destination
from pipeline.stage import lock
from pipeline.stage.artifacts import Paths, verify
from pipeline.transcript.transcript import Transcript
from pipeline.weights import upload


def push(run: Path, root: Path, destinations: Iterable[str], *, private: bool) -> None:
    """Push a run's export, and print how to load it from each destination.

    Args:
      run: Run file; its `[config] checkpointers` are destinations too.
      root: Folder that holds `data/`.
      destinations: Destinations: owner/name on the hub, or gs://bucket/prefix.
      private: Whether a repository that is created on the hub is private.

    Raises:
      LockstepError: A destination is invalid or missing, the run has no current export, the audit
        or a server refused it.
    """
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
    with lock.hold(root / "data" / ".export.lock"):  # so that the stage cannot replace it meanwhile
        files = _with_results(accepted(paths), paths)
        last = Transcript(paths.need("train") / "transcript").rounds[-1].round
        key = paths.keys.key("train")
        for name, checkpoint in checkpoints.items():
            loaded = upload.push(
                checkpoint, files, step=last.step, epoch=last.epoch, run=key, private=private
            )
            print(
                f"push: {name} has step {last.step} of run {key}; in [model.LLM], "
                f"checkpoint = {toml(loaded)}"
            )


def _with_results(files: list[Path], paths: Paths) -> list[Path]:
    """The files of an export, with the report's card, which has the results, if there is one."""
    if not paths.is_made("report"):
        return files
    verify(paths.made("report"), [summary.CARD])
    card = paths.out("report") / summary.CARD
    return [card if file.name == card.name else file for file in files]
