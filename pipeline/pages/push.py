"""`lockstep push`: uploads an accepted export, to the hub or into a bucket, for others to load."""

import json
from collections.abc import Iterable
from pathlib import Path

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.pages.summary import blame
from pipeline.runfile.psyche import DESTINATION_FORM, destination
from pipeline.stage import lock
from pipeline.stage.artifacts import Paths, read_json
from pipeline.transcript.transcript import Transcript
from pipeline.weights import bucket, hf, hub


def push(run: Path, root: Path, destinations: Iterable[str], *, private: bool) -> None:
    """Pushes a run's export, and prints how it is loaded from each destination.

    Args:
      run: the run file; its `[config] checkpointers` are destinations too.
      root: the folder where `data/` lies.
      destinations: owner/name on the hub, or gs://bucket/prefix.
      private: whether a repository that is made on the hub is private.

    Raises:
      LockstepError: a destination is of another form or there is none, there is no export of
        today's run, the witness refused it, or a server did.
    """
    named = [*destinations, *runfile.load(run).config.checkpointers]
    if not named:
        raise LockstepError(
            f"{run}: [config] checkpointers names no destination, and neither does the command; "
            f"expected {DESTINATION_FORM}"
        )
    places = {name: destination(name) for name in named}
    for name, place in places.items():
        if place is None:
            raise LockstepError(f"{name!r}: expected {DESTINATION_FORM}")
    paths = Paths("report", run, root)
    with lock.hold(root / "data" / ".export.lock"):  # or the stage might replace it meanwhile
        files = _accepted(paths)
        last = Transcript(paths.need("train") / "transcript").rounds[-1].round
        key = paths.keys.key("train")
        for name, place in places.items():
            match place:
                case runfile.CheckpointHub(repo_id=repo_id):
                    message = f"Step {last.step} of run {key}"
                    version = {"revision": hub.push(files, repo_id, message, private=private)}
                case runfile.CheckpointGcs(bucket=there, prefix=prefix):
                    about = {"step": last.step, "epoch": last.epoch, "run": key}
                    version = {"generation": bucket.push(files, there, prefix or "", **about)}
            loaded = place.model_copy(update=version)
            print(
                f"push: {name} has step {last.step} of run {key}; in [model.LLM], "
                f"checkpoint = {_toml(loaded)}"
            )


def _toml(checkpoint: runfile.CheckpointHub | runfile.CheckpointGcs) -> str:
    """A checkpoint as a run file has it, on one line."""
    fields = checkpoint.model_dump(exclude_none=True)[checkpoint.tag()]
    said = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())
    return f"{{ {checkpoint.tag()} = {{ {', '.join(said)} }} }}"


def _accepted(paths: Paths) -> list[Path]:
    """The files of the export, checked against their hashes.

    Raises:
      LockstepError: there is none of today's run, or the witness refused it.
    """
    folder = paths.need("export")
    if (folder / hf.REFUSED).is_file():
        findings = read_json(folder / hf.REFUSED)["findings"]
        raise LockstepError(
            f"{folder / hf.REFUSED}: {blame(findings)}; expected an export that the witness "
            "accepted"
        )
    made = paths.root / paths.keys.made("export")
    return sorted(file for file in folder.iterdir() if file.is_file() and file.name != made.name)
