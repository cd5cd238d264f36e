"""Tasks of lm_eval by their names: definitions, data, and the hash of both.

Data are kept in the store's folder `datasets`, as the library `datasets` caches them; what is there
needs no network.

A task may run lm_eval's own code, and no other unless the run file trusts it: to lm_eval a YAML
file is a program. `!function` runs a file beside it, a template may reach all of Python, and a
metric that lm_eval does not know is fetched from the hub as code.
"""

import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.errors import LockstepError, brief
from lockstep.files import read_bytes
from pipeline import extras
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.untrusted_files import YAML_LENGTH, load_yaml

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.manager import TaskDict

TRUST_KEY = "[evaluate] trust_task_code = true"
MISSING = object()
YAML = (".yaml", ".yml")
MOST_REPEATS = 10_000  # of a request, at most
# Keys of a definition that say where this machine keeps files; their content is in the documents.
PLACE_KEYS = {"config_source", "data_files", "data_dir", "cache_dir"}


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
"""Psyche's ten tasks by Psyche's names; docs/reference/tasks.md says where the two differ."""


class Loaded(NamedTuple):
    """A name of lm_eval's in the run file, loaded."""

    name: str
    tasks: dict[str, "Task"]  # the tasks that it stands for, by their names
    # the groups that it stands for, by their names; none if it is one task
    groups: dict[str, "Group"]
    members: dict[str, list[str]]  # names of each group's parts


def version() -> str:
    """Return the version of lm_eval."""
    try:
        return metadata.version("lm_eval")
    except metadata.PackageNotFoundError:
        raise extras.lacking("[evaluate] tasks", "lm_eval") from None


def main_first(name: str, metrics: dict) -> dict:
    """Return the metrics of a task with Psyche's main one first, if it is one of Psyche's."""
    main = PSYCHE_TASKS[name].main if name in PSYCHE_TASKS else None
    return {key: metrics[key] for key in sorted(metrics, key=lambda key: key != main)}


@contextmanager
def data_in(folder: Path, *, trusted: bool = False) -> Iterator[None]:
    """Keep what lm_eval downloads in a folder during the block; the user's cache is left alone.

    The libraries say nothing but errors, and show their bars in a terminal only. `trusted` is
    `[evaluate] trust_task_code`.
    """
    with ExitStack() as before:
        for library in ("lm_eval", "datasets", "huggingface_hub"):
            logger = logging.getLogger(library)
            before.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)

        import datasets.config
        from huggingface_hub import constants
        from lm_eval.api import task

        quiet = not sys.stderr.isatty()
        places = {
            (constants, "HF_HUB_CACHE"): str(folder / "hub"),
            (datasets.config, "HF_DATASETS_CACHE"): folder,
            (datasets.config, "DOWNLOADED_DATASETS_PATH"): folder / "downloads",
            (datasets.config, "EXTRACTED_DATASETS_PATH"): folder / "downloads" / "extracted",
            (task, "tqdm"): partial(task.tqdm, disable=quiet),
        }
        before.enter_context(replaced(places))
        if not trusted:
            before.enter_context(without_fetched_metrics())
        if quiet and not datasets.are_progress_bars_disabled():
            before.callback(datasets.enable_progress_bars)
            datasets.disable_progress_bars()
        yield


def load(names: Sequence[str], folder: Path, *, trusted: bool = False) -> list[Loaded]:
    """Load a run file's tasks of lm_eval and their data, which `data_in(folder)` keeps.

    What is in it is not downloaded again. `trusted` is `[evaluate] trust_task_code`.

    Raises:
      LockstepError: A name is no task's, its data cannot be had, it is code that is not trusted, or
        a task comes twice.
    """
    loaded, owner = [], {}
    for name in names:
        try:
            manager, spec = _finder().find(name, trusted=trusted)
            task_dict = _load(manager, spec)
        except LockstepError as error:
            where = "" if str(error).startswith(f"{name}:") else f"{name}: "
            raise LockstepError(f"[evaluate] tasks: {where}{error}") from error
        except Exception as error:  # of lm_eval, of datasets or of a task's own code
            offline = "" if name.endswith(YAML) else f" in {folder}, or the hub's"
            raise LockstepError(
                f"[evaluate] tasks: {name}: {reason(error)}; expected its data{offline}"
            ) from error
        if not task_dict["tasks"]:
            raise LockstepError(f"[evaluate] tasks: {name}: a group without tasks, expected some")
        for task, definition in task_dict["tasks"].items():
            _check_kind(name, definition)
            if task in owner:
                raise LockstepError(
                    f"[evaluate] tasks: found {task} in {owner[task]} and in {name}, expected each "
                    "task once"
                )
            owner[task] = name
        groups, members = task_dict.get("groups", {}), task_dict.get("group_map", {})
        loaded.append(Loaded(name, task_dict["tasks"], groups, members))
    return loaded


def check_known(names: Sequence[str], *, trusted: bool) -> None:
    """Check that names are lm_eval's tasks that the run file trusts, without their data."""
    for name in names:
        try:
            _finder().find(name, trusted=trusted)
        except LockstepError as error:
            raise LockstepError(f"[evaluate] tasks: {name}: {error}") from error


def sha256_of(loaded: Loaded, few_shot: int | None) -> str:
    """Return the hash of what a name of lm_eval stands for: a task, or tasks with names.

    It is of the canonical JSON of the definition, without the places of files, and of all documents
    that are asked or shown as examples.
    """
    hashes = [(name, _task_sha256(task, few_shot)) for name, task in loaded.tasks.items()]
    return hashes[0][1] if len(hashes) == 1 else listing_sha256(hashes)


def _check_kind(name: str, task: "Task") -> None:
    """Refuse a task of lm_eval that runs what a model writes, or asks about more than text."""
    repeats = task.get_config("repeats")
    if getattr(task, "UNSAFE_CODE", False):
        what = "runs code that the model writes, expected a task that does not"
    elif getattr(task, "MULTIMODAL", False):
        what = "asks about images or sounds, expected a task about text"
    elif type(repeats) is int and repeats > MOST_REPEATS:
        what = f"repeats = {repeats}, expected at most {MOST_REPEATS}"
    else:
        return
    raise LockstepError(f"[evaluate] tasks: {name}: {what}")


def _load(manager: "TaskManager", spec: str) -> "TaskDict":
    """Load a task of lm_eval from the store; from the network only what is missing."""
    import datasets.config
    from huggingface_hub import constants

    places = {(module, "HF_HUB_OFFLINE"): True for module in (constants, datasets.config)}
    offline = any(getattr(*place) for place in places)
    try:
        with replaced(places):
            return manager.load(spec)
    except Exception:
        if offline:
            raise
    return manager.load(spec)


@cache
def _finder() -> "_Finder":
    """The one finder of tasks of a process, since a training may ask several times."""
    return _Finder()


class _Finder:
    """Finds a task's definition: lm_eval has 14,000 files of them, which take seconds to index."""

    def __init__(self) -> None:
        import lm_eval.tasks

        self._folder = Path(lm_eval.tasks.__file__).parent
        self._quick = lm_eval.tasks.TaskManager(include_defaults=False)
        self._full: TaskManager | None = None

    def find(self, name: str, *, trusted: bool) -> tuple["TaskManager", str]:
        """Return a manager of lm_eval that loads a task, and the name or path by which it does."""
        if name.endswith(YAML):
            if not trusted:
                raise LockstepError(
                    "found a YAML file, which may run code, expected a task of lm_eval; "
                    f"{TRUST_KEY} allows it"
                )
            return self._own(Path(name))
        of_lm_eval = PSYCHE_TASKS[name].lm_eval if name in PSYCHE_TASKS else name
        if path := self._file(of_lm_eval):
            return self._quick, str(path)
        if self._full is None:
            from lm_eval.tasks import TaskManager

            self._full = TaskManager()
        if of_lm_eval not in self._full.all_tasks:
            close = get_close_matches(name, {*PSYCHE_TASKS, *self._full.all_tasks}, 3)
            like = f", such as {', '.join(close)}" if close else ""
            raise LockstepError(f"expected a task of lm_eval {version()}{like}")
        return self._full, of_lm_eval

    def _own(self, path: Path) -> tuple["TaskManager", str]:
        """A user's file of a task; the members of a group stand in it, or in its folder."""
        if not path.is_file():
            raise LockstepError("no such file, expected a task")
        definition = _plain(path)
        if not isinstance(definition, dict) or not {"task", "group"} & definition.keys():
            raise LockstepError("expected a key task or group")
        if "group" not in definition:
            return self._quick, str(path)
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_defaults=False, include_path=path.parent)
        for member in definition.get("task") or []:
            if isinstance(member, str) and member not in manager.all_tasks:
                raise LockstepError(
                    f"{brief(member)} is no task of a readable YAML file in {path.parent}, "
                    "expected one"
                )
        return manager, definition["group"]

    def _file(self, name: str) -> Path | None:
        """The only file of lm_eval that is named for a task and defines it, as most are."""
        paths = list(self._folder.glob(f"**/{name}.yaml")) if name.isidentifier() else []
        if len(paths) != 1:
            return None
        definition = _plain(paths[0])
        return paths[0] if definition.get("task") == name and "group" not in definition else None


def _plain(path: Path) -> Any:
    """Return the content of a task's YAML file, with functions as their names."""
    return load_yaml(read_bytes(path, YAML_LENGTH), str(path), "BaseLoader")


def _task_sha256(task: "Task", few_shot: int | None) -> str:
    shots = task.get_config("num_fewshot")
    documents: list[Any] = [list(task.eval_docs)]
    if (shots or 0) > 0 or (few_shot or 0) > 0 and shots != 0:
        documents.append(list(task.fewshot_docs() or []))
    content = {"definition": _placeless(task.dump_config()), "documents": documents}
    canonical = json.dumps(
        content, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=_as_text
    )
    return hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest()


def _placeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _placeless(part) for key, part in value.items() if key not in PLACE_KEYS}
    return [_placeless(part) for part in value] if isinstance(value, list | tuple) else value


def _as_text(value: Any) -> str:
    """Return text for what JSON lacks in a task: a function's source, or a value's type."""
    if callable(value):
        try:
            return inspect.getsource(value)
        except (TypeError, OSError):
            return getattr(value, "__qualname__", type(value).__name__)
    return f"{type(value).__name__}: {value}"


# ---- Trust ----


@contextmanager
def replaced(places: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Give attributes of lm_eval's modules other values while the block runs."""
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
                f"{TRUST_KEY} allows it"
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
    """Return the error in which an lm_eval task's code or data ended, in one line."""
    if isinstance(error, ImportError) and error.name == "evaluate":
        return f"a metric is fetched as code; {TRUST_KEY} allows it"
    return brief(f"{type(error).__name__}: {error}", 200)
