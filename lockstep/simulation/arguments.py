"""Checks of the arguments of `simulate`, before anything is compiled or written."""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.optim.expect import expect, expect_counts, expect_flags, expect_groups, expect_integer

COUNTS = ("peers", "steps", "batch_size", "eval_every", "checkpoint_every", "max_round_train_time")
MAYBE = ("correlation_every", "micro_batch")  # counts, or None
FLAGS = ("shuffle", "show_progress")


def check(given: Mapping[str, Any]) -> None:
    """Check the arguments of `simulate` that are counts, flags or have a rule of their own.

    Raises:
      LockstepError: One is not what was expected.
    """
    maybe = {name: given[name] for name in MAYBE if given[name] is not None}
    counts = {name: given[name] for name in COUNTS} | maybe
    _one_line(expect_counts, **counts)
    for name, count in counts.items():
        fits = "a Python integer from 1, below 2**32"
        _one_line(expect, name, count, lambda x: isinstance(x, int) and x < 2**32, fits)
    _one_line(expect_flags, **{name: given[name] for name in FLAGS})
    _one_line(_expect_below, "seed", given["seed"], 2**32, "2**32")
    percent = given["verification_percent"]
    _one_line(_expect_below, "verification_percent", percent, 100, "100")
    most = given["batch_size"]
    fits = f"at most batch_size ({most})"
    _one_line(expect, "micro_batch", given["micro_batch"], lambda x: x is None or x <= most, fits)
    fits = "'float32' or 'bfloat16'"
    _one_line(expect, "dtype", given["dtype"], lambda x: x in ("float32", "bfloat16"), fits)
    _one_line(expect_groups, stacked=given["stacked"])
    called = "a function of a round's numbers, or None"
    _one_line(expect, "on_round", given["on_round"], lambda x: x is None or callable(x), called)


def check_call(function: Callable, name: str, form: str, *arguments: Any) -> None:
    """Check that a function can be called with so many arguments.

    Args:
      function: The function.
      name: What errors call it.
      form: How it should be called.
      arguments: What it will be called with.

    Raises:
      LockstepError: It is no function, or has other arguments.
    """
    if not callable(function):
        kind = type(function).__name__
        raise LockstepError(f"simulate: {name} is {kind}, expected a function: {form}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some that are written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise LockstepError(
            f"simulate: {name} is a function that cannot be called so: {error}; expected {form}"
        ) from error


def folder(name: str, path: Any) -> Path | None:
    """Return a folder that is there and can be written to, made where it is not; None for None.

    Raises:
      LockstepError: It is no path, or cannot be made or written to.
    """
    if path is None:
        return None
    named = isinstance(path, str | os.PathLike) and str(path)
    if not named:
        raise LockstepError(f"simulate: {name} is {path!r}, expected a path or None")
    made = Path(path)
    try:
        made.mkdir(parents=True, exist_ok=True)
        if not os.access(made, os.W_OK | os.X_OK):
            raise PermissionError(0, "no permission to write there")
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        why = getattr(error, "strerror", None) or error
        raise LockstepError(
            f"simulate: {name} is {str(made)!r}, expected a folder to write to: {why}"
        ) from error
    return made


def _expect_below(name: str, value: Any, end: int, written: str) -> None:
    within = f"a Python integer from 0, below {written}"
    expect_integer(name, value, lambda x: isinstance(x, int) and 0 <= x < end, within)


def _one_line(check: Callable, *arguments: Any, **settings: Any) -> None:
    try:
        check(*arguments, **settings)
    except ValueError as error:
        raise LockstepError(f"simulate: {error}") from None
