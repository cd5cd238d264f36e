"""The hash of what functions by rules compute, by whichever version of JAX they are traced.

Each value's hash is that of the operation that gives it and of the values it is computed from. So
what changes no number is no part of it: the order of operations, those whose results nothing
depends on, calls, and conversions to the type that a value has. Two functions of the same hash
give the same bits, since each operation by rules gives one number.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.same_bits.evaluation import (
    CALLS,
    Evaluation,
    carry_of_scan,
    closed_program,
    is_program,
)

# They give what they take: barriers for the compiler, and where an array lies.
GIVE_INPUTS = {"optimization_barrier", "sharding_constraint"}
# Settings that change no number: names, where arrays lie, and how versions of JAX count a scan's.
NO_NUMBER = {"name", "weak_type", "sharding", "out_sharding", "unroll", "num_consts", "num_carry",
             "ft_in", "ft_out"}  # fmt: skip
# What an operation does in versions of JAX that have no such setting.
ALWAYS = {("top_k", "is_stable"): True}


def hash_of_operations(function: Callable[..., Any], *arguments: Any) -> str:
    """Return the hash of the operations of a function by rules, hex; arguments may be shapes."""
    return _of_program(jax.make_jaxpr(function)(*arguments))


def _of_program(program: Any) -> str:
    closed = closed_program(program)
    avals = [variable.aval for variable in closed.jaxpr.invars]
    inputs = [f"input {n} {aval.dtype}{aval.shape}" for n, aval in enumerate(avals)]
    return _hash([_said(result) for result in _Hashing().run(closed, inputs)])


class _Hashing(Evaluation):
    """The evaluation of a program to its constants, and the hashes of its other values."""

    def _apply(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        name, settings = equation.primitive.name, equation.params
        if name in CALLS:
            inner = next(settings[key] for key in ("jaxpr", "call_jaxpr") if key in settings)
            return self.run(closed_program(inner), inputs)
        if name in GIVE_INPUTS:
            return inputs
        if name == "convert_element_type":
            (value,), dtype = inputs, settings["new_dtype"]
            if equation.invars[0].aval.dtype == dtype:
                return inputs
            if isinstance(value, np.ndarray):  # some versions of JAX convert it at once
                return [value.astype(dtype)]
        said = {
            key: _said(value)
            for key, value in sorted(settings.items())
            if value is not None and key not in NO_NUMBER and value != ALWAYS.get((name, key))
        }
        if name == "scan":
            said["carry"] = str(carry_of_scan(equation))
        types = [f"{variable.aval.dtype}{variable.aval.shape}" for variable in equation.outvars]
        whole = _hash([name, said, types, *map(_said, inputs)])
        return [f"{number} of {whole}" for number in range(len(types))]


def _said(value: Any) -> str:
    """Return a setting or a value as text: the hash of an array or a program."""
    if is_program(value):
        return _of_program(value)
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(_said, value))})"
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        return f"{array.dtype}{array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
    return str(value)


def _hash(said: list[Any]) -> str:
    return hashlib.sha256(repr(said).encode()).hexdigest()
