"""What a workload adds to the table of `lockstep check`: what its worker says of the model."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from parts.workload.tables import workload_of
from pipeline.preflight.row import CheckRow, Inspection, Mark
from pipeline.runfile import Run
from pipeline.tokens.shards import read_shards

SHOWN = 8  # names of tensors of a kind


def rows(run: Run, shards: Path | None = None) -> Iterator[CheckRow]:
    """Start a run's worker once, if it has one, and yield what it says of its model.

    With the folder of the run's shards, also the loss of a few rows, on which it takes a step.

    Raises:
      LockstepError: It does not start, or cannot do what the run asks of it.
    """
    for name, text in _facts(run, shards) if workload_of(run).factory else ():
        yield CheckRow(Mark.FINE, name, text)


def _facts(run: Run, shards: Path | None) -> Iterator[tuple[str, str]]:
    from parts.workload.inner_steps import NO_STATE, Job, take
    from parts.workload.subject import rows_of
    from parts.workload.worker import GRADIENT, Worker, drawn_rows

    workload = workload_of(run)
    listing = read_shards(shards) if shards else None
    with closing(Worker(run, rows_of(run, listing))) as worker:
        spec, environment = worker.describe(), worker.environment
        capabilities, loss = worker.capabilities, None
        rows_NW = drawn_rows(run, shards)[1][: run.peers.micro_batch] if shards else ()
        if listing and workload.inner != "gradient":
            rate = run.llm.lr_schedule.base_lr
            loss = take(worker, Job(worker.init(), [rows_NW], [rate], NO_STATE, "check", 0)).loss
        elif listing and GRADIENT in capabilities:
            loss, _ = worker.gradient(worker.init(), rows_NW, seed=0)
    if loss is not None:
        yield "loss", f"{loss:.6g} at first, of {len(rows_NW)} rows of {shards}"
    yield "workload", f"{workload.factory}, code and settings of hash {spec.code[:12]}"
    yield "steps", _who(run)
    yield "capabilities", ", ".join(sorted(capabilities))
    yield "layout", spec.layout_hash
    names = [f"{tensor.name} {[*tensor.shape]}" for tensor in spec.tensors]
    yield "travels", f"{spec.parameters:,} numbers in {len(names):,} tensors: {_first_few(names)}"
    for why in ("frozen", "excluded", "buffer", "statistics"):
        if frozen := [tensor.name for tensor in spec.frozen if tensor.why == why]:
            verb = "are computed anew to measure and export" if why == "statistics" else "stay"
            yield why, f"{len(frozen):,} tensors {verb}: {_first_few(frozen)}"
    if spec.integers:
        yield "integers", f"{len(spec.integers):,} tensors stay: {_first_few(spec.integers)}"
    for name, other in spec.tied.items():
        yield "tied", f"{name} is {other}, and travels once"
    for name, value in environment.items():
        yield name.removeprefix("worker_"), value


def _who(run: Run) -> str:
    steps = run.llm.inner_steps
    each = "each round" if steps == 1 else f"{steps} in each round"
    if workload_of(run).inner == "gradient":
        return f"{each}, by {run.llm.optimizer.tag()} on the workload's gradients"
    return f"{each}, by the workload's own optimizer ({workload_of(run).inner})"


def _first_few(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more:,} more" if more > 0 else "")


NEEDS = ()
LOOKS = (Inspection("model", None, rows),)
