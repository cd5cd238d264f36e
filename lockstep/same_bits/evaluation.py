"""A function evaluated by rules that define one number for each of its operations."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lockstep.same_bits.elementary import Arithmetic
from lockstep.same_bits.products import Product, in_float64
from lockstep.same_bits.rules import Numbers, apply_rule, has_rule, is_exact, types_of

HERE, JAX = Path(__file__).parent, Path(jax.__file__).parent

CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2",
         "custom_jvp_call", "custom_vjp_call"}  # fmt: skip
SUMS = {"add", "add_any", "sub"}  # of bfloat16 in float32, which XLA may leave so for what follows


class _ByRules(str):
    """The name in a jaxpr of what `same_bits` returns: a user's function may be called so, too."""


class NamedOperation(str):
    """The name in a jaxpr of an operation of a function, with its types and line."""

    equation: Any  # what asks for it
    product: Product  # by which it multiplies, if it does


# Whether each operation is traced as a program of its own, of such a name; else those without rule.
OPENED = jax.make_user_context(default_value=False)


def same_bits(function: Callable[..., Any], product: Product = in_float64) -> Callable[..., Any]:
    """Return a function of the same arguments, each of whose operations is rounded in one way.

    Some of its arguments have an element. `product` is one of `products.PRODUCTS`. Such a function
    may be a part of another: what is by rules stays as it is.
    """

    def by_rules(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        evaluation = _ByTheRules(Numbers(Arithmetic.in_program(arguments), copy(product)))
        leaves = evaluation.run(closed, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    by_rules.__name__ = _ByRules("same_bits")
    return jax.jit(by_rules)


def without_rule(function: Callable[..., Any], *arguments: Any) -> frozenset[str]:
    """Return the operations of a function that have no rule, since their bits may differ.

    Each by its name, types, and the line of code that asks for it, as "erf of float32 at
    models/llama.py:42". The function is as in `same_bits`; its arguments may be shapes.
    """
    closed = jax.make_jaxpr(same_bits(function))(*arguments)
    names = (equation.params.get("name") for equation in _equations(closed.jaxpr))
    return frozenset(str(name) for name in names if isinstance(name, NamedOperation))


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of those within it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from _equations(closed_program(inner).jaxpr)


def is_program(value: Any) -> bool:
    """Return whether a setting of an equation is a program of its own."""
    return isinstance(value, (ClosedJaxpr, Jaxpr))


class Evaluation:
    """The evaluation of a jaxpr, one equation after the other; a subclass says what each gives."""

    def run(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of the evaluated jaxpr."""
        jaxpr = closed.jaxpr
        values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))
        results_of_all = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
        last = {v: e for e in jaxpr.eqns for v in e.invars if not isinstance(v, Literal)}

        def value(variable: Any) -> Any:
            if isinstance(variable, Literal):
                return np.asarray(variable.val, variable.aval.dtype)
            return values[variable]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [value(v) for v in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
            for variable in {v for v in equation.invars if not isinstance(v, Literal)}:
                if last[variable] is equation and variable not in results_of_all:
                    del values[variable]  # or all arrays are held at once
        return [value(variable) for variable in jaxpr.outvars]

    def _apply(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        """Return the evaluated results of one equation."""
        raise NotImplementedError


@dataclass(frozen=True)
class _ByTheRules(Evaluation):
    """An evaluation by the rules of some numbers."""

    numbers: Numbers

    def _apply(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        """Return the results of one operation by its rule."""
        name, settings = equation.primitive.name, equation.params
        is_by_rules = isinstance(settings.get("name"), _ByRules)
        if name in CALLS and not is_by_rules:
            if settings.get("differentiated") and settings["prevent_cse"]:
                inputs = lax.optimization_barrier(inputs)  # or it is computed once, and kept
            inner = next(settings[key] for key in ("jaxpr", "call_jaxpr") if key in settings)
            return self.run(closed_program(inner), inputs)
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "while":
            return self._while(settings, inputs)
        if name == "cond":
            index, *operands = inputs
            branches = [
                lambda *x, branch=branch: self.run(branch, x) for branch in settings["branches"]
            ]
            results: list[Any] = lax.switch(index, branches, *operands)
            return results
        if is_by_rules:
            return _bound(equation, *inputs)
        exact, ruled = is_exact(equation), has_rule(equation)

        def operation(*inputs: Any) -> list[Any]:
            if ruled and not exact:
                return [apply_rule(self.numbers, equation, inputs)]
            results = _bound(equation, *inputs)
            if equation.primitive.name in SUMS and results[0].dtype.itemsize == 2:
                results = [self.numbers.arithmetic.apart(results[0])]
            return results

        if (exact or ruled) and not OPENED.value:
            return operation(*inputs)
        operation.__name__ = name = NamedOperation(_described(equation))
        name.equation, name.product = equation, self.numbers.product
        return jax.jit(operation)(*inputs)

    def _scan(self, equation: Any, inputs: list[Any]) -> list[Any]:
        settings, body = equation.params, equation.params["jaxpr"]
        first, last = carry_of_scan(equation)
        carried = last - first

        def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(body, [*inputs[:first], *carry, *row])
            return results[:carried], results[carried:]

        carry, stacked = lax.scan(
            step, inputs[first:last], inputs[last:],
            settings["length"], settings["reverse"], settings["unroll"],
        )  # fmt: skip
        return [*carry, *stacked]

    def _while(self, settings: dict[str, Any], inputs: list[Any]) -> list[Any]:
        first = settings["cond_nconsts"]
        last = first + settings["body_nconsts"]
        test_consts, body_consts, carry = inputs[:first], inputs[first:last], inputs[last:]
        results: list[Any] = lax.while_loop(
            lambda carry: self.run(settings["cond_jaxpr"], [*test_consts, *carry])[0],
            lambda carry: self.run(settings["body_jaxpr"], [*body_consts, *carry]),
            carry,
        )
        return results


def _described(equation: Any) -> str:
    types = " and ".join(dict.fromkeys(types_of(equation)))
    places = " to places that may be equal" * (equation.primitive.name == "scatter")
    return f"{equation.primitive.name}{places} of {types}{_line_of(equation)}"


def _line_of(equation: Any) -> str:
    """Return " at FOLDER/FILE:LINE" of the caller of an operation; "" where unknown."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = Path(frame.file_name)
        if not path.is_relative_to(JAX) and path.parent != HERE:
            return f" at {path.parent.name}/{path.name}:{frame.line_num}"
    return ""


def _bound(equation: Any, *inputs: Any) -> list[Any]:
    """Return the results of an operation that is evaluated as it is."""
    results = equation.primitive.bind(*inputs, **equation.params)
    return results if equation.primitive.multiple_results else [results]


def carry_of_scan(equation: Any) -> tuple[int, int]:
    """Return which inputs of a scan are carried: from the first on, up to the last.

    Versions of JAX count them differently; rows have one more axis than inside.
    """
    body = equation.params["jaxpr"].jaxpr
    last = len(equation.invars) - sum(_ranks_differ(equation.invars, body.invars))
    stacked = sum(_ranks_differ(equation.outvars, body.outvars))
    return last - (len(equation.outvars) - stacked), last


def _ranks_differ(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
    return [a.aval.ndim != b.aval.ndim for a, b in zip(outside, inside, strict=True)]


def closed_program(jaxpr: Any) -> Any:
    """Return a jaxpr with its constants: some versions of JAX have a type of its own for one."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())
