"""Where checkpoints are pushed to: a repository on the hub, or a folder of a bucket.

What no audit has accepted goes beside what one has: to the branch, or the folder, `unaudited`.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline import runfile
from pipeline.weights import bucket, hub_model

UNAUDITED = "unaudited"


def push(
    checkpoint: runfile.CheckpointHub | runfile.CheckpointGcs,
    files: Mapping[str, Path],
    *,
    step: int,
    epoch: int,
    run: str,
    private: bool,
    audited: bool = True,
) -> runfile.CheckpointHub | runfile.CheckpointGcs:
    """Push the files of a checkpoint, and return it with the version that it is read by.

    Files are by their names; a bucket takes those of the model, without folders. `step` is the last
    trained round, and `run` the key of the run's stage train. `private` concerns a repository that
    is created on the hub, and `audited` says whether an audit accepted the checkpoint.

    Raises:
      LockstepError: The server refused, or cannot be reached.
    """
    if isinstance(checkpoint, runfile.CheckpointHub):
        message = f"Step {step} of run {run}"
        branch = "main" if audited else UNAUDITED
        if not audited:
            message = f"{message}, the end of epoch {epoch}: unaudited"
        revision = hub_model.push(
            files, checkpoint.repo_id, message, private=private, branch=branch
        )
        return checkpoint.model_copy(update={"revision": revision})
    prefix = checkpoint.prefix or ""
    if not audited:
        prefix = f"{prefix.rstrip('/')}/{UNAUDITED}".lstrip("/")
    model = [path for name, path in files.items() if "/" not in name]
    generation = bucket.push(model, checkpoint.bucket, prefix, step=step, epoch=epoch, run=run)
    return checkpoint.model_copy(update={"prefix": prefix or None, "generation": generation})
