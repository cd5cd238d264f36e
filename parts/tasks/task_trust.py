"""Limits on a task's definition: it is data, and runs no code except lm_eval's own.

lm_eval takes a YAML file as a program: `!function` runs a file beside it, a metric that it does not
know is fetched from the hub as code, and a template may reach all of Python. Here a file of
somebody's is checked before it is parsed, and templates are rendered in a sandbox.

What is not bounded: the time and memory of a template or of a regular expression, and which files
and addresses are read as data.
"""

import datetime
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from jinja2 import StrictUndefined, Undefined
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from lockstep.errors import LockstepError, brief
from lockstep.files import check_regular_file
from pipeline.stage import given_files

KEY = "[evaluate] trust_task_code = true"
YAML_BYTES = 2**18
TEXT = 2**24  # characters that a template may write
DIGITS = 2**16  # bits of a number that it may compute
FUNCTION = "!function"
TAGS = {FUNCTION, "!", *yaml.SafeLoader.yaml_constructors, None}
# Formats of data without code; others ask a database, or name classes to import.
FORMATS = ("arrow", "csv", "json", "parquet", "text")
OF_HUB = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
DATA_KEYS = (
    *("data_dir", "data_files", "revision"),
    *("column_names", "delimiter", "encoding", "field", "sep"),
)
SCHEMES = ("hf", "http", "https")
# Methods of other objects, such as images, could write files.
PLAIN = (
    *(str, bytes, bool, int, float, NoneType, list, tuple, dict, set, frozenset, range),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(LoopContext, Macro, Namespace, Cycler, Joiner, Undefined),
)


# ---- YAML ----


def check_yaml(path: Path, *, functions: bool) -> None:
    """Check a stranger's YAML file before it is parsed, since parsers are recursive.

    `functions` says whether it may name functions.

    Raises:
      LockstepError: It is no regular file; it is too large, or too deep; or it names code.
    """
    check_regular_file(path, most=YAML_BYTES)
    check_tag = partial(_check_tag, path, functions=functions)
    given_files.check_yaml(path.read_bytes(), str(path), check_tag)


def _check_tag(path: Path, tag: str | None, *, functions: bool) -> None:
    if tag == FUNCTION and not functions:
        raise LockstepError(
            f"{path}: found {FUNCTION}, which runs code, expected none; {KEY} allows it"
        )
    if tag not in TAGS:
        raise LockstepError(f"{path}: found the tag {brief(tag)}, expected plain YAML")


@contextmanager
def replaced(places: dict[tuple[Any, str], Any]) -> Iterator[None]:
    """Give attributes of modules other values while the block runs."""
    with ExitStack() as before:
        for (module, name), value in places.items():
            before.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


@contextmanager
def loading(*, own: bool, trusted: bool) -> Iterator[None]:
    """Refuse what would run code that is not lm_eval's, while the block loads a task.

    `own` says whether lm_eval itself defines it; `trusted` is `[evaluate] trust_task_code`.

    Raises:
      LockstepError: It would.
    """
    import datasets
    from lm_eval import tasks
    from lm_eval.api import registry, task
    from lm_eval.tasks import _factory, _index, _yaml_loader, manager

    folder = Path(tasks.__file__).parent.resolve()
    load_yaml, load_dataset = _yaml_loader.load_yaml, datasets.load_dataset
    get_metric = task.get_metric

    def checked_yaml(path: Path | str, *, _seen: set[Path] | None = None, **how: bool) -> dict:
        file = Path(path).expanduser().resolve()
        # a file that somebody's includes is read as his
        if not all(one.is_relative_to(folder) for one in (file, *(_seen or ()))):
            check_yaml(file, functions=trusted or how.get("resolve_func") is False)
        return load_yaml(path, _seen=_seen, **how)

    def checked_metric(metric: str, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or metric not in registry.metric_registry:
            raise LockstepError(
                f"metric {brief(str(metric))} is fetched as code, expected one of lm_eval's own; "
                f"{KEY} allows it"
            )
        return get_metric(metric)

    def checked_data(path: str, name: str | None = None, **options: Any) -> Any:
        check_data(path, options)
        return load_dataset(path, name, **options)

    def no_prompt(prompt: str, *_: Any) -> None:
        raise LockstepError(f"found use_prompt: {brief(str(prompt))}, expected doc_to_text")

    modules = (_yaml_loader, _index, _factory, manager)
    places: dict[tuple[Any, str], Any] = {(one, "load_yaml"): checked_yaml for one in modules}
    if not trusted:
        places[task, "get_metric"] = checked_metric
    if not trusted and not own:
        places |= {(datasets, "load_dataset"): checked_data, (task, "get_prompt"): no_prompt}
    with replaced(places):
        yield


@contextmanager
def without_metric_code() -> Iterator[None]:
    """Keep the library `evaluate`, whose metrics are code from the hub, from being imported."""
    before = sys.modules.get("evaluate")
    sys.modules["evaluate"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["evaluate"]
        if before is not None:
            sys.modules["evaluate"] = before


def reason(error: Exception) -> str:
    """Return the error in which a task's code or data ended, in one line."""
    if isinstance(error, ImportError) and error.name == "evaluate":
        return f"a metric is fetched as code; {KEY} allows it"
    return brief(f"{type(error).__name__}: {error}", 200)


def check_data(path: Any, options: dict[str, Any]) -> None:
    """Check what a stranger's task asks of `datasets.load_dataset`.

    Raises:
      LockstepError: It is more than reading files, or a data set of the hub.
    """
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES as KNOWN

    name = str(path)
    elsewhere = bool(re.fullmatch(OF_HUB, name)) or Path(name).is_dir()
    if name not in FORMATS and (name in KNOWN or not elsewhere):
        raise LockstepError(
            f"dataset_path is {brief(name)}, expected a data set of the hub, a folder, or one of "
            f"{', '.join(FORMATS)}"
        )
    for key in options:
        if key not in DATA_KEYS:
            raise LockstepError(
                f"dataset_kwargs has {brief(str(key))}, expected some of {', '.join(DATA_KEYS)}"
            )
    for place in _texts([options.get("data_files"), options.get("data_dir")]):
        scheme, colon, _ = place.partition("://")
        if "::" in place or (colon and scheme not in SCHEMES):
            raise LockstepError(
                f"dataset_kwargs names {brief(place)}, expected a path, or an address of "
                f"{', '.join(SCHEMES)}"
            )


def _texts(value: Any) -> Iterator[str]:
    """All texts in nested lists and tables."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


# ---- Templates ----


class Templates(ImmutableSandboxedEnvironment):
    """lm_eval's templates, in which a name leads to nothing but plain values and their methods."""

    intercepted_binops = frozenset(["*", "**"])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may see an attribute."""
        return isinstance(obj, PLAIN) and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power that is not too large.

        Raises:
          SecurityError: It is.
        """
        if operator == "**":
            whole = isinstance(left, int) and isinstance(right, int)
            too_large = whole and abs(left).bit_length() * right > DIGITS
        else:
            pairs = ((left, right), (right, left))
            too_large = any(
                isinstance(one, str | bytes | list | tuple)
                and isinstance(times, int)
                and len(one) * times > TEXT
                for one, times in pairs
            )
        if too_large:
            raise SecurityError(f"the result of {operator} is too large")
        return super().call_binop(context, operator, left, right)


def _regex_replace(text: str, pattern: str, new: str, count: int = 0) -> str:
    """lm_eval's filter regex_replace."""
    return re.sub(pattern, new, text, count=count)


_templates = Templates(undefined=StrictUndefined, keep_trailing_newline=True)
_templates.filters["regex_replace"] = _regex_replace
del _templates.globals["lipsum"]  # it is random


@lru_cache(256)
def _compiled(template: str) -> Callable[..., Iterator[str]]:
    return _templates.from_string(template).generate


def render(template: str, document: dict[str, Any]) -> str:
    """Return what a task's template writes of a document; in place of lm_eval's `apply_template`.

    Raises:
      LockstepError: It is no template, asks for more than values, or writes too much.
    """
    pieces, length = [], 0
    try:
        for piece in _compiled(template)(**document):
            pieces.append(piece)
            length += len(piece)
            if length > TEXT:
                raise SecurityError(f"it writes more than {TEXT} characters")
    except Exception as error:  # of any kind: it is a stranger's program
        reason = brief(f"{type(error).__name__}: {error}", 200)
        raise LockstepError(f"template {brief(template)}: {reason}") from error
    return "".join(pieces)
