"""A workload's description of itself, for people to read before a run begins."""

from collections.abc import Iterator
from contextlib import closing

from parts.workload.worker import NO_ROWS, Worker
from pipeline import runfile

SHOWN = 8  # names of tensors of a kind


def lines(run: runfile.Run) -> Iterator[str]:
    """Start a run's worker once, and yield what it says of its model, for people to read.

    Raises:
      LockstepError: It does not start, or cannot do what the run asks of it.
    """
    workload = run.workload
    with closing(Worker(run, NO_ROWS)) as worker:
        told, environment = worker.describe(), worker.environment
        able = worker.capabilities
    yield f"workload     {workload.factory}, code and settings of hash {told.code[:12]}"
    yield f"local steps  {_who(run)}"
    yield f"capabilities {', '.join(sorted(able))}"
    yield f"layout       {told.layout_hash}"
    names = [f"{tensor.name} {[*tensor.shape]}" for tensor in told.tensors]
    yield f"travels      {told.parameters:,} numbers in {len(names):,} tensors: {_some(names)}"
    for why in ("frozen", "excluded", "buffer"):
        if kept := [tensor.name for tensor in told.frozen if tensor.why == why]:
            yield f"{why:<13}{len(kept):,} tensors stay as they are: {_some(kept)}"
    if told.integers:
        yield f"integers     {len(told.integers):,} tensors stay: {_some(told.integers)}"
    for name, other in told.tied.items():
        yield f"tied         {name} is {other}, and travels once"
    for name, value in environment.items():
        yield f"{name.removeprefix('worker_'):<13}{value}"


def _who(run: runfile.Run) -> str:
    steps = run.llm.inner_steps
    each = "each round" if steps == 1 else f"{steps} in each round"
    if run.workload.inner == "gradient":
        return f"{each}, by {run.llm.optimizer.tag()} on the workload's gradients"
    return f"{each}, by the workload's own optimizer ({run.workload.inner})"


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")
