"""Whether the results that are published agree: evaluate.json, the card, what is measured here."""

import math
from typing import Annotated, Any

import yaml
from pydantic import Field

from lockstep.errors import LockstepError, brief
from lockstep.programs.permutation import MOST_INDICES
from lockstep.tables.table import Count, NotNegative, Table
from parts.publication import layout
from parts.publication.accepted_export import CARD
from pipeline.audit.verdict_text import HELD_OUT, HELD_OUT_SPLIT
from pipeline.language_model import held_out
from pipeline.language_model.held_out import MeanLoss
from pipeline.stage.given_files import check_yaml
from pipeline.subject import OpenedExport

LOSS_TOLERANCE = 1e-3  # nats: rounding of another machine
ROUNDING = 1e-6  # of numbers that follow from the loss, relative
FENCE, INDEX = "---\n", "model-index"


class Evaluated(Table):
    """evaluate.json: numbers of the held-out text, null where nothing is held out, and scores."""

    held_out_loss: NotNegative | None
    """Nats per token."""
    held_out_stderr: NotNegative | None
    """Its standard error, nats; null of a single sequence."""
    perplexity: NotNegative | None
    """e to the power of the loss."""
    bits_per_byte: NotNegative | None
    """Bits per byte of text; null where the bytes are unknown."""
    sequences: Count | None
    """Held-out sequences that are measured."""
    split_sequences: Annotated[Count, Field(le=MOST_INDICES)] | None
    """Sequences of the whole held-out split, of which these are drawn."""
    tokens: Count | None
    """Tokens that are predicted in them."""
    bytes: Count | None
    """Bytes of text that these stand for."""
    tasks: dict[str, dict[str, float | None] | None]
    """Scores of tasks by their names: acc, acc_stderr and so on."""
    workload: dict[str, bool | int | float | str] | None = None
    """What a workload measured by itself; null of a model of models/."""

    @property
    def held_out(self) -> dict[str, float | int | None]:
        """The numbers of the held-out text."""
        return self.model_dump(exclude={"tasks", "workload"})


def compare(
    said: Evaluated, loss: MeanLoss, data: held_out.HeldOutRows, opened: OpenedExport
) -> None:
    """Compare evaluate.json with the held-out `loss` that was measured here.

    Raises:
      LockstepError: A number is another.
    """
    published = _compare_loss(said, loss)
    _compare_numbers(said, opened.numbers(published, data, []))


def _compare_loss(said: Evaluated, loss: MeanLoss) -> MeanLoss:
    """Return the published loss, which is within rounding of what was measured here."""
    published = MeanLoss(said.held_out_loss, said.held_out_stderr)
    for field, of_author, here in zip(MeanLoss._fields, published, loss, strict=True):
        same = of_author is None if here is None else of_author is not None
        if not same or (here is not None and not abs(here - of_author) <= LOSS_TOLERANCE):
            raise _differs(f"held_out_{'loss' if field == 'mean' else field}", of_author, here)
    return published


def _compare_numbers(said: Evaluated, due: dict[str, float | int | None]) -> None:
    for name, expected in due.items():
        value = getattr(said, name)
        known = value is not None and expected is not None
        if value != expected and not (known and math.isclose(value, expected, rel_tol=ROUNDING)):
            raise _differs(name, value, expected)


def check(card: str, said: Evaluated | None) -> None:
    """Check that the results in a card's front matter are those of evaluate.json.

    The hub shows them beside the model. All held-out numbers are there, and of tasks some or all.
    A card without results has no evaluate.json: `said` is None.

    Raises:
      LockstepError: A result is missing, was added, or is another.
    """
    from huggingface_hub.repocard_data import model_index_to_eval_results

    index = _front(card).get(INDEX)
    numbers = {} if said is None else said.model_dump(include=set(HELD_OUT))
    due = {("held_out", name): value for name, value in numbers.items() if value is not None}
    if index is None and (not due or (said is not None and said.workload is not None)):
        return  # the hub's index knows no loss that only a workload's code can explain
    try:
        [_] = index
        _, results = model_index_to_eval_results(index)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LockstepError(
            f"{CARD}: {brief(repr(error))} in its {INDEX}, expected one model with results"
        ) from error
    scores = {} if said is None else said.tasks
    known = due | {
        (task, metric): value
        for task, metrics in scores.items()
        for metric, value in (metrics or {}).items()
        if value is not None
    }
    for result in results:
        which = (result.dataset_type, result.metric_type)
        value = known.pop(which, None) if all(isinstance(part, str) for part in which) else None
        name = brief(f"{which[1]} of {which[0]}")
        if value is None or result.metric_value != round(value, 6):
            expected = "none" if value is None else f"{value:.6f}"
            raise LockstepError(
                f"{CARD}: {name} is {brief(repr(result.metric_value))} in its {INDEX}, expected "
                f"{expected} as in {layout.EVALUATED}"
            )
        if which in due and (result.dataset_name, result.metric_name) != _names(which[1]):
            raise LockstepError(
                f"{CARD}: {name} has another name in its {INDEX}, expected {_names(which[1])}"
            )
    for dataset, metric in sorted(due.keys() & known.keys()):
        raise LockstepError(
            f"{CARD}: no {metric} of {dataset} in its {INDEX}, expected it as in {layout.EVALUATED}"
        )


def _names(metric: str) -> tuple[str, str]:
    """Return the names of the data and of the metric on a card."""
    return HELD_OUT_SPLIT, HELD_OUT[metric]


def _front(card: str) -> dict[str, Any]:
    """Return a card's front matter, which has one meaning only: as the stages write YAML."""
    beginning, _, rest = card.partition(FENCE)
    front, fence, _ = rest.partition(f"\n{FENCE}")
    try:
        check_yaml(front, f"{CARD}: its front matter")
        found = yaml.safe_load(front)
        same = yaml.safe_dump(found, sort_keys=False) == f"{front}\n"
    except (yaml.YAMLError, RecursionError, ValueError):
        found, same = None, False
    if beginning or not fence or not same or not isinstance(found, dict):
        raise LockstepError(
            f"{CARD}: its front matter is not as the stages export and report write"
        )
    return found


def _differs(name: str, said: object, found: object) -> LockstepError:
    said, found = (
        "null" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
        for value in (said, found)
    )
    return LockstepError(f"{layout.EVALUATED}: {name} is {said}, expected {found} as measured here")
