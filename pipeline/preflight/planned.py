"""`lockstep plan`, also for a run whose model has not been converted yet."""

from collections.abc import Iterator
from pathlib import Path

import jax

from pipeline import runfile
from pipeline.preflight import plan
from pipeline.preflight.model import model_of_run


def footprint(run: runfile.Run, root: Path, converted: bool) -> plan.Footprint:
    """Return what a run takes; of a model on the hub, its config.json is enough.

    Args:
      run: The whole run.
      root: Folder of `data/`.
      converted: Whether `data/init` is this run's, and not another's.

    Raises:
      LockstepError: The model is not known yet, or no message of the run can be in time.
    """
    if _on_hub(run) and not converted and (model := model_of_run(run, root)):
        return plan.plan_of(run, model.config)
    return plan.plan(run, root)


def memory_lines(run: runfile.Run, root: Path, converted: bool) -> Iterator[str]:
    """Yield what the run takes of memory on the devices here, for people to read.

    Raises:
      LockstepError: The model is not known yet.
    """
    if _on_hub(run) and not converted:
        yield "memory         not known before `lockstep convert`"
    elif run.peers.attention == "cudnn" and jax.default_backend() != "gpu":
        yield (
            'memory         not known here: [peers] attention = "cudnn" is compiled for an NVIDIA '
            f"GPU, and this is a {jax.default_backend()}"
        )
    else:
        yield from plan.memory_lines(run, root)


def _on_hub(run: runfile.Run) -> bool:
    return isinstance(run.llm.checkpoint, runfile.CheckpointHub)
