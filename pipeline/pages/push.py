"""`lockstep push`: uploads an accepted export to the hub or a bucket, for others to load."""

from collections.abc import Iterable
from pathlib import Path

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.publication import aside, publish
from pipeline.publication.accepted_export import accepted, with_results
from pipeline.runfile.importer import toml
from pipeline.runfile.psyche import DESTINATION_FORM, destination
from pipeline.stage import lock
from pipeline.stage.artifacts import Paths
from pipeline.transcript.transcript import Transcript
from pipeline.weights import upload


def push(
    run: Path, root: Path, destinations: Iterable[str], *, private: bool, with_proof: bool = False
) -> None:
    """Push a run's export, and print how to load it from each destination.

    Args:
      run: Run file; its `[config] checkpointers` are destinations too.
      root: Folder that holds `data/`.
      destinations: Destinations: owner/name on the hub, or gs://bucket/prefix.
      private: Whether a repository that is created on the hub is private.
      with_proof: Whether a repository gets what others need to check it, as `lockstep publish`
        writes it.

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
    with aside.folder(root / "data" / "runs", "push") as place:
        published = place / "publication"
        if with_proof:
            publish.write(published, run, root, 1, None)
        with lock.hold(root / "data" / ".export.lock"):  # the stage cannot replace it meanwhile
            files = {file.name: file for file in with_results(accepted(paths), paths)}
            if with_proof:
                proof = sorted(path for path in published.rglob("*") if path.is_file())
                files = {path.relative_to(published).as_posix(): path for path in proof}
            last = Transcript(paths.need("train") / "transcript").rounds[-1].round
            key = paths.keys.key("train")
            for name, checkpoint in checkpoints.items():
                loaded = upload.push(
                    checkpoint, files, step=last.step, epoch=last.epoch, run=key, private=private
                )
                how = f"in [model.LLM], checkpoint = {toml(loaded)}"
                print(f"push: {name} has step {last.step} of run {key}; {how}")
