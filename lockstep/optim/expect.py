"""Checks of settings, their types as well as their bounds, before an optimizer is built.

Without them `delay=0.5` would raise no error, and peers would never adopt what was exchanged. A
traced setting passes, as in `optax.inject_hyperparams`: it has no value yet.

All functions here raise a ValueError that names the setting, its value and what was expected.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SHOWN_CHARACTERS = 80  # characters of a value; a longer one is shown as its type


def setting(name: str, value: Any, within: Callable[[Any], Any], expected: str) -> None:
    """Check an optimizer's setting, unless it is traced."""
    if isinstance(value, jax.core.Tracer) or within(value):
        return
    shown = repr(value)
    if len(shown) > SHOWN_CHARACTERS or "\n" in shown:
        shown = f"of type {type(value).__name__}"
    raise ValueError(f"{name} is {shown}, expected {expected}")


def integer(name: str, value: Any, within: Callable[[Any], Any], expected: str) -> None:
    """Check a setting that is an integer; neither 2.0 nor True is one."""
    setting(name, value, lambda x: _is_integer(x) and within(x), expected)


def number(name: str, value: Any, within: Callable[[Any], Any], expected: str) -> None:
    """Check a setting that is a finite number, of Python, NumPy or JAX; True is not one."""
    setting(name, value, lambda x: _is_number(x) and within(x), expected)


def counts(**settings: Any) -> None:
    """Check settings that are integers from 1, by name."""
    for name, value in settings.items():
        integer(name, value, lambda x: x >= 1, "an integer from 1")


def rates(**settings: Any) -> None:
    """Check settings that are numbers from 0, by name."""
    for name, value in settings.items():
        number(name, value, lambda x: x >= 0, "a number from 0")


def clip(clip_grad_norm: Any) -> None:
    """Check a setting that bounds a norm: a number from 0, or None."""
    if clip_grad_norm is not None:
        rates(clip_grad_norm=clip_grad_norm)


def learning_rate(value: Any) -> None:
    """Check the setting of a learning rate: a number from 0, or a function of the step."""
    if not callable(value):
        expected = "a number from 0, or a function of the step"
        number("learning_rate", value, lambda x: x >= 0, expected)


def share(name: str, value: Any) -> None:
    """Check a setting that is a share: a number in [0, 1]."""
    number(name, value, lambda x: 0 <= x <= 1, "a number from 0 to 1")


def decay(name: str, value: Any) -> None:
    """Check a setting that is a decay in [0, 1): a decayed mean with 1 never takes anything in."""
    number(name, value, lambda x: 0 <= x < 1, "a number from 0, below 1")


def flags(**settings: Any) -> None:
    """Check that settings are True or False, by name: "no" would count as true."""
    for name, value in settings.items():
        setting(name, value, lambda x: isinstance(x, bool | np.bool_), "True or False")


def one_of(name: str, value: Any, names: Collection[str]) -> None:
    """Check that a setting is one of `names`."""
    expected = f"one of {', '.join(names)}"
    setting(name, value, lambda x: isinstance(x, str) and x in names, expected)


def groups(**settings: Any) -> None:
    """Check a setting of names of groups; one string would be as many names as it has letters."""

    def within(value: Any) -> bool:
        is_collection = isinstance(value, Sequence | Set) and not isinstance(value, str)
        return is_collection and all(isinstance(name, str) for name in value)

    for name, value in settings.items():
        setting(name, value, within, "a tuple of names")


def by_group(check: Callable[..., None], **settings: Any) -> None:
    """Check settings by group of params: a mapping whose values `check` takes."""
    for name, value in settings.items():
        setting(name, value, lambda x: isinstance(x, Mapping), "a dictionary by group")
        check(**{f"{name}[{group!r}]": item for group, item in value.items()})


def kind(kind: type, **settings: Any) -> None:
    """Check that settings are of a class, by name."""
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    for name, value in settings.items():
        if not isinstance(value, kind) or isinstance(value, type):  # a class has its functions too
            actual = value.__name__ if isinstance(value, type) else type(value).__name__
            remedy = ""
            if kind.__name__ == "Optimizer" and isinstance(value, optax.GradientTransformation):
                remedy = ": from_optax makes it one"
            raise ValueError(f"{name} is {actual}, expected {article} {kind.__name__}{remedy}")


def function(name: str, value: Any, signature: str) -> None:
    """Check a setting that can be called."""
    setting(name, value, callable, f"a function: {signature}")


def aggregate(value: Any) -> None:
    """Check a setting that is an `AggregateFn`."""
    function("aggregate", value, "aggregate(values, weight) -> tree")


def dtype(name: str, value: Any, *dtypes: Any) -> None:
    """Check a setting that is one of `dtypes`."""

    def within(value: Any) -> bool:
        try:
            return value is not None and jnp.dtype(value) in map(jnp.dtype, dtypes)
        except TypeError:
            return False

    setting(name, value, within, "one of " + ", ".join(jnp.dtype(dtype).name for dtype in dtypes))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if not isinstance(value, int | float):
        dtype = getattr(value, "dtype", None)
        real = dtype is not None and (
            jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
        )
        if not real or np.ndim(value):
            return False
    return not isinstance(value, bool) and bool(np.isfinite(value))
