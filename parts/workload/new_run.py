"""What a workload says for a new run file: its model, the rows of its data, and what suits it."""

from contextlib import closing
from functools import partial
from typing import Any, Literal, NamedTuple

from lockstep.tables.table import Count, Positive, Table
from lockstep.tables.validation import validate
from parts.workload.rows.writing import examples_of
from parts.workload.worker import NEEDED, NO_ROWS, Worker
from pipeline import runfile


class Suggested(Table):
    """A workload's attribute `suggests`."""

    learning_rate: Positive | None = None
    """The highest one, of AdamW; others have one in proportion to their cards' rates."""
    batch: Count | None = None
    """Rows of a peer's local step."""
    passes: Count | None = None
    """How often a run goes over the data."""
    inner: Literal["gradient", "worker"] | None = None
    """`workload.inner`."""


class WorkloadSummary(NamedTuple):
    """What a workload said for a new run.

    Attributes:
      model: Its model, as a transcript's header has it.
      params: Number of its parameters that travel.
      groups: Top-level names of them.
      suggested: What suits it.
      words, rows: Words of a row of its own data, and rows to train on; 0 without data.
      held_out: Rows of its own data that are held out.
      inner: What `workload.inner` can be: it gives gradients, or takes steps of its own.
    """

    model: dict[str, Any]
    params: int
    groups: tuple[str, ...]
    suggested: Suggested
    words: int
    rows: int
    held_out: int
    inner: tuple[str, ...]


def ask(run: runfile.Run) -> WorkloadSummary:
    """Start a worker once, and return what its workload says for a new run file.

    Raises:
      LockstepError: It does not start, its data are no rows, or it suggests what cannot be.
    """
    with closing(Worker(run, NO_ROWS, for_training=False)) as worker:
        capabilities = worker.capabilities
        description = worker.describe()
        probe = worker.ask(lambda session: session.process.call("capability_probe", {}))
        suggested = validate(Suggested, probe.get("suggests") or {}, f"{worker.name}: suggests")
        own = worker.dataset() if "dataset" in capabilities else {}
        counts, words = {}, 0
        for split, arrays in own.items():
            if arrays:
                where = f'{worker.name}: dataset("{split}")'
                examples = examples_of(where, partial(dict, arrays))
                counts[split], words = examples.count, examples.rows.words
    return WorkloadSummary(
        model={"workload": description.model_dump(mode="json"), "rows": NO_ROWS},
        params=description.parameters,
        groups=tuple(sorted({tensor.name.split(".")[0] for tensor in description.tensors})),
        suggested=suggested,
        words=words,
        rows=counts.get("train", 0),
        held_out=counts.get("held_out", 0),
        inner=tuple(inner for inner, capability in NEEDED.items() if capability in capabilities),
    )
