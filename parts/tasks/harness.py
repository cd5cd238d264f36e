"""Tasks run by lm-evaluation-harness, on a model of ours."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.errors import JaxRuntimeError

from lockstep.errors import LockstepError
from lockstep.files import write_json, write_text
from parts.tasks import lm_eval_tasks
from parts.tasks.lm_eval_tasks import Loaded, main_first, reason
from parts.tasks.task_model import TaskModel
from pipeline import runfile
from pipeline.scores import Metric, TaskResult
from pipeline.stage import pins
from pipeline.stage.artifacts import listing_sha256

if TYPE_CHECKING:
    from lm_eval.api.task import Task

SAMPLES, HASHES = "samples.jsonl", "hashes.json"
DATASETS = "datasets"  # folder of the store
RESAMPLED_DRAWS = 1000  # draws of a standard error that has no formula
TASK_SEED = 0  # of tasks that draw at random, as in lm_eval


def run_tasks(
    names: Sequence[str],
    model: TaskModel,
    settings: runfile.Evaluate,
    store: Path,
    *,
    pin: str = "",
    folder: Path | None = None,
) -> list[TaskResult]:
    """Run tasks in lm_eval's harness; return a result for each name that has numbers of its own.

    A group whose definition combines no numbers stands for its tasks.

    Names are lm_eval's of tasks and groups, Psyche's, and YAML files; `pin` is `[pins] tasks`. The
    folder gets SAMPLES, a JSON line of each document's requests and answers, and HASHES, of tasks.
    """
    library = f"lm_eval {lm_eval_tasks.version()}"
    trusted = settings.trust_task_code
    with lm_eval_tasks.data_in(store / DATASETS, trusted=trusted), _repeatable():
        from lm_eval.evaluator import evaluate

        from parts.tasks.lm_eval import LmEvalModel

        loaded = lm_eval_tasks.load(names, store / DATASETS, trusted=trusted)
        hashes = {item.name: lm_eval_tasks.sha256_of(item, settings.few_shot) for item in loaded}
        pins.check("tasks", pin, listing_sha256(hashes.items()), ", ".join(names))
        for item in loaded:
            for task in item.tasks.values():
                _set_examples(item.name, task, settings)
        with _one_line(", ".join(names)):
            output = evaluate(
                LmEvalModel(model, settings.seed),
                {
                    "tasks": {key: task for item in loaded for key, task in item.tasks.items()},
                    "groups": {key: group for item in loaded for key, group in item.groups.items()},
                    "group_map": {key: of for item in loaded for key, of in item.members.items()},
                },
                limit=settings.limit,
                bootstrap_iters=RESAMPLED_DRAWS,
            )
        results = [
            _result(item, name, output, hashes[item.name], library)
            for item in loaded
            for name in _result_names(item, output)
        ]
    if folder is not None:
        write_text(folder / SAMPLES, "".join(_lines(output["samples"])))
        write_json(folder / HASHES, {"sha256": listing_sha256(hashes.items()), "tasks": hashes})
    return results


def _set_examples(name: str, task: "Task", settings: runfile.Evaluate) -> None:
    """Set the harness's solved examples as `lm_eval.simple_evaluate` does, and their seed.

    There must be as many documents to show; `name` is the task's in the run file.
    """
    by_definition = task.get_config("num_fewshot")
    if settings.few_shot is not None and by_definition != 0:
        task.set_config(key="num_fewshot", value=settings.few_shot)
    elif by_definition is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=settings.few_shot_seed)
    shots, most = task.get_config("num_fewshot"), _most_examples(task)
    if most is not None and shots > most:
        key = "its num_fewshot" if shots == by_definition else "[evaluate] few_shot"
        raise LockstepError(
            f"[evaluate] tasks: {name}: {key} is {shots}, expected at most {most}, the documents "
            "that can be shown"
        )


def _most_examples(task: "Task") -> int | None:
    """The harness's largest number of solved examples, unless a task's sampler decides."""
    from lm_eval.api.samplers import ContextSampler, FirstNSampler

    sampler = getattr(task, "sampler", None)
    if type(sampler) not in (ContextSampler, FirstNSampler):
        return None
    # a random draw takes one more, since the document in question may be among them
    same_split = task.fewshot_cfg.split == task.get_config("test_split")
    return len(sampler.df) - (same_split and type(sampler) is ContextSampler)


def _result_names(item: Loaded, output: dict[str, Any]) -> list[str]:
    """The names of lm_eval that a name of the run file stands for in the results."""
    top = [name for name in item.groups if not any(name in m for m in item.members.values())]
    return top if any(name in output.get("groups", {}) for name in top) else list(item.tasks)


def _result(
    item: Loaded, name: str, output: dict[str, Any], task_sha256: str, library: str
) -> TaskResult:
    numbers = (output["groups"] if name in item.groups else output["results"])[name]
    tasks = list(item.tasks) if name in item.groups else [name]
    samples = [(task, sample) for task in tasks for sample in _once(output["samples"][task])]
    shots = {output["n-shot"][task] for task in tasks}
    path, part = (item.tasks[tasks[0]].get_config(k) for k in ("dataset_path", "dataset_name"))
    part = f" ({part})" if part and len(tasks) == 1 else ""
    single = len(_result_names(item, output)) == 1 and not item.name.endswith(lm_eval_tasks.YAML)
    return TaskResult(
        item.name if single else name,
        main_first(item.name, dict(_metrics(numbers))),
        chance=_chance([(item.tasks[task], sample["doc"]) for task, sample in samples]),
        documents=len(samples),
        few_shot=max(shots),
        sha256=task_sha256,
        source=f"{library}: {path}{part}",
    )


def _once(samples: list[dict]) -> list[dict]:
    """Return each document's first sample of the harness; it has one for each filter of a task."""
    return list({sample["doc_id"]: sample for sample in reversed(samples)}.values())


def _metrics(numbers: dict[str, Any]) -> Iterator[tuple[str, Metric]]:
    """The harness's metrics `acc,none`, `acc_stderr,none` and so on as acc; filters keep names."""
    for key, value in numbers.items():
        metric, comma, filtered = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = numbers.get(f"{metric}_stderr,{filtered}")
        has_stderr = isinstance(stderr, int | float)
        name = metric if filtered == "none" else key
        yield name, Metric(float(value), float(stderr) if has_stderr else None)


def _chance(documents: list[tuple["Task", dict]]) -> float | None:
    """The accuracy of a guess in the harness, if all tasks are choices."""
    if any(task.OUTPUT_TYPE != "multiple_choice" for task, _ in documents):
        return None
    return float(np.mean([1 / len(task.doc_to_choice(doc)) for task, doc in documents]))


def _lines(samples: dict[str, list[dict]]) -> Iterator[str]:
    for task, documents in samples.items():
        for sample in documents:
            yield json.dumps({"task": task} | sample, ensure_ascii=False, default=str) + "\n"


@contextmanager
def _one_line(names: str) -> Iterator[None]:
    """Report in one line the error in which a task's templates, functions, metrics or data end."""
    try:
        yield
    except LockstepError as error:
        text = str(error)
        message = text if text.startswith("[evaluate]") else f"[evaluate] tasks: {names}: {text}"
        raise LockstepError(message) from error
    except (JaxRuntimeError, MemoryError, OSError):  # of this machine
        raise
    except Exception as error:
        raise LockstepError(
            f"[evaluate] tasks: {names}: {reason(error)}; expected tasks that run to the end"
        ) from error


@contextmanager
def _repeatable() -> Iterator[None]:
    """Draws of the harness's tasks that ask Python or NumPy; no processes of lm_eval's own."""
    state, numpy_state = random.getstate(), np.random.get_state()
    before = os.environ.get("DISABLE_MULTIPROC")
    random.seed(TASK_SEED)
    np.random.seed(TASK_SEED)
    os.environ["DISABLE_MULTIPROC"] = "1"  # a fork of a process that runs JAX may hang
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
        os.environ.pop("DISABLE_MULTIPROC")
        if before is not None:
            os.environ["DISABLE_MULTIPROC"] = before
