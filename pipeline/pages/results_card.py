"""The model card with the results of stage evaluate added to the export's own card.

The front matter has them in the hub's `model-index` form, from which the hub shows them beside the
model; the text has them as a table with intervals.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from pipeline.audit.verdict_text import HELD_OUT, HELD_OUT_SPLIT, SAMPLE, measured_on, seen_in_train
from pipeline.pages.templates import code
from pipeline.scores import Score, scores

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

VERDICT_HEADING = "## Verdict\n"  # of the export's card: where the results go
WORKLOAD = "workload"  # key of evaluate.json: what a workload measured by itself
GENERATION = "text-generation"  # the hub's name of what the model does


def with_results(card: str, evaluated: dict[str, Any], name: str, data: str) -> str:
    """Return the export's card with the results of evaluate.json; without any, as it is.

    `name` is that of the model in the front matter, and `data` the key of the stage that left the
    held-out text.
    """
    from huggingface_hub.repocard_data import eval_results_to_model_index

    metrics, by_workload = scores(evaluated["tasks"]), WORKLOAD in evaluated
    results = [*_held_out_results(evaluated, data), *map(_task_result, metrics)]
    if not results:
        return card
    _, front, text = card.split("---\n", 2)
    # the hub's index knows no loss that only a workload's code can explain
    index = {} if by_workload else {"model-index": eval_results_to_model_index(name, results)}
    front_matter = yaml.safe_dump(yaml.safe_load(front) | index, sort_keys=False)
    before, heading, after = text.partition(VERDICT_HEADING)
    table = "\n".join(_workload_section(evaluated) if by_workload else _table(evaluated, metrics))
    return f"---\n{front_matter}---\n{before}{table}\n\n{heading}{after}"


def _held_out_results(evaluated: dict[str, Any], data: str) -> Iterator["EvalResult"]:
    from huggingface_hub import EvalResult

    for metric, name in HELD_OUT.items():
        if evaluated[metric] is not None:
            yield EvalResult(
                task_type=GENERATION,
                dataset_type="held_out",
                dataset_name=HELD_OUT_SPLIT,
                dataset_revision=data,
                metric_type=metric,
                metric_name=name,
                metric_value=round(evaluated[metric], 6),
            )


def _task_result(score: Score) -> "EvalResult":
    from huggingface_hub import EvalResult

    args = {"documents": score.documents, "interval_95": score.interval, "chance": score.chance}
    return EvalResult(
        task_type=GENERATION,
        dataset_type=score.task,
        dataset_name=f"{score.task}, {score.source}",
        dataset_revision=score.sha256,
        dataset_args={"num_few_shot": score.few_shot},
        metric_type=score.metric,
        metric_name=score.metric,
        metric_value=round(score.value, 6),
        metric_args={
            key: [round(end, 6) for end in value] if key == "interval_95" else value
            for key, value in args.items()
            if value is not None
        },
    )


def _workload_section(evaluated: dict[str, Any]) -> Iterator[str]:
    yield "## Evaluation\n"
    yield "Of the exported params, read back from this folder, by the workload's own code.\n"
    if evaluated["held_out_loss"] is not None:
        yield f"- held-out loss, as the workload has it: {evaluated['held_out_loss']:.4f}"
        yield _sample(evaluated)
    for metric, value in evaluated[WORKLOAD].items():
        yield f"- {code(metric)}: {code(value)}"


def _sample(evaluated: dict[str, Any]) -> str:
    measured = measured_on(*(evaluated[name] for name in SAMPLE))
    return f"- of the loss: {measured}; {seen_in_train(evaluated['held_out_seen'])}"


def _table(evaluated: dict[str, Any], metrics: list[Score]) -> Iterator[str]:
    yield "## Evaluation\n"
    yield "Of the exported weights, read back from this folder. Intervals are of 95 %.\n"
    for metric, name in HELD_OUT.items():
        if evaluated[metric] is not None:
            yield f"- {name}: {evaluated[metric]:.4f}"
    if evaluated["held_out_loss"] is not None:
        yield _sample(evaluated)
    if not metrics:
        return
    yield "\n| task | documents | examples | metric | score | interval | chance |"
    yield "|---|---|---|---|---|---|---|"
    for score in metrics:
        chance = "" if score.chance is None else f"{score.chance:.3g}"
        yield (
            f"| {score.task} | {score.documents:,} | {score.few_shot} | {score.metric} "
            f"| {score.value:.4f} | {score.around} | {chance} |"
        )
    yield "\n| task | SHA-256 of its documents | from |\n|---|---|---|"
    for task in dict.fromkeys((score.task, score.sha256, score.source) for score in metrics):
        yield f"| {task[0]} | `{task[1]}` | {task[2]} |"
