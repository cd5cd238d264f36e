"""Which code a task may run: lm_eval's own, and no other unless the run file trusts it.

To lm_eval a YAML file is a program: `!function` runs a file beside it, a template may reach all of
Python, and a metric that lm_eval does not know is fetched from the hub as code.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lockstep.errors import LockstepError, brief

KEY = "[evaluate] trust_task_code = true"
MISSING = object()


@contextmanager
def replaced(places: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Give attributes of modules other values while the block runs."""
    with ExitStack() as before:
        for (module, name), value in places.items():
            before.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


@contextmanager
def without_fetched_metrics() -> Iterator[None]:
    """Refuse metrics that lm_eval does not have itself, while the block runs.

    The library `evaluate`, which fetches them, cannot be imported meanwhile.
    """
    from lm_eval.api import registry, task

    get_metric = task.get_metric

    def checked_metric(metric: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or metric not in registry.metric_registry:
            raise LockstepError(
                f"metric {brief(str(metric))} is fetched as code, expected one of lm_eval's own; "
                f"{KEY} allows it"
            )
        return get_metric(metric)

    before = sys.modules.get("evaluate", MISSING)
    sys.modules["evaluate"] = None  # type: ignore[assignment]
    try:
        with replaced({(task, "get_metric"): checked_metric}):
            yield
    finally:
        del sys.modules["evaluate"]
        if before is not MISSING:
            sys.modules["evaluate"] = before  # type: ignore[assignment]


def reason(error: Exception) -> str:
    """Return the error in which a task's code or data ended, in one line."""
    if isinstance(error, ImportError) and error.name == "evaluate":
        return f"a metric is fetched as code; {KEY} allows it"
    return brief(f"{type(error).__name__}: {error}", 200)
