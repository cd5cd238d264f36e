"""Psyche's ten tasks: Psyche's names, and their names in lm_eval.

`docs/reference/tasks.md` says where the two differ.
"""

from typing import NamedTuple


class PsycheTask(NamedTuple):
    """One of Psyche's tasks: its name in lm_eval, and the metric that Psyche shows."""

    lm_eval: str
    main: str


PSYCHE_TASKS = {
    "arc_challenge": PsycheTask("arc_challenge", "acc_norm"),
    "arc_easy": PsycheTask("arc_easy", "acc_norm"),
    "boolq": PsycheTask("boolq", "acc"),
    "ceval_valid": PsycheTask("ceval-valid", "acc"),
    "hellaswag": PsycheTask("hellaswag", "acc_norm"),
    "mmlu": PsycheTask("mmlu", "acc"),
    "mmlu_cf": PsycheTask("mmlu_continuation", "acc_norm"),
    "mmlu_pro": PsycheTask("mmlu_pro", "exact_match,custom-extract"),
    "openbookqa": PsycheTask("openbookqa", "acc_norm"),
    "piqa": PsycheTask("piqa", "acc_norm"),
}


def main_first(name: str, metrics: dict) -> dict:
    """Return the metrics of a task with Psyche's main one first, if it is one of Psyche's."""
    main = PSYCHE_TASKS[name].main if name in PSYCHE_TASKS else None
    return {key: metrics[key] for key in sorted(metrics, key=lambda key: key != main)}
