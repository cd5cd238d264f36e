"""Evaluates a function by rules, so that its result has the same bits on every machine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lockstep.optim.optimizer import Tree
from lockstep.programs.same_bits.arithmetic import Arithmetic
from lockstep.programs.same_bits.rules import ONE_WAY, RULES

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "custom_jvp_call", "custom_vjp_call")


def same_bits(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return a function of the same arguments, each of whose operations is rounded in one way.

    Its last argument is a step, int32 [], at least 0.
    """

    def evaluated(*arguments: Tree) -> Tree:
        return _evaluate(function, arguments)[0]

    return evaluated


def without_rule(function: Callable[..., Tree], *arguments: Tree) -> frozenset[str]:
    """Return the names of the operations of a function that have no rule: their bits may differ.

    Args:
      function: As of `same_bits`.
      *arguments: Its arguments, or their shapes.
    """
    found: set[str] = set()

    def evaluate(*arguments: Tree) -> Tree:
        result, names = _evaluate(function, arguments)
        found.update(names)
        return result

    jax.eval_shape(evaluate, *arguments)
    return frozenset(found)


def _evaluate(function: Callable[..., Tree], arguments: Sequence[Tree]) -> tuple[Tree, set[str]]:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    evaluation = _Evaluation(Arithmetic.from_step(arguments[-1]))
    leaves = evaluation.run(closed, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), evaluation.unruled


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation in progress.

    Attributes:
      arithmetic: What operations of numbers become.
      unruled: Names of the operations that have no rule, taken as they are.
    """

    arithmetic: Arithmetic
    unruled: set[str] = field(default_factory=set)

    def run(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr."""
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = {}
        values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def value(variable: Any) -> Any:
            if isinstance(variable, Literal):
                return np.asarray(variable.val, variable.aval.dtype)
            return values[variable]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [value(v) for v in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value(variable) for variable in jaxpr.outvars]

    def _apply(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        """Return the results of one operation."""
        name, settings = equation.primitive.name, equation.params
        if name in CALLS:
            inside = next(settings[key] for key in ("jaxpr", "call_jaxpr") if key in settings)
            return self.run(_closed(inside), inputs)
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "while":
            return self._while(settings, inputs)
        if name == "cond":
            index, *operands = inputs
            branches = [
                lambda *x, branch=branch: self.run(branch, x) for branch in settings["branches"]
            ]
            found: list[Any] = lax.switch(index, branches, *operands)
            return found
        floats = any(map(_is_float, (*equation.invars, *equation.outvars)))
        if floats and name not in ONE_WAY and not _adds_once(equation):
            if _has_rule(equation):
                return RULES[name](self.arithmetic, inputs, settings)
            self.unruled.add(name)
        results = equation.primitive.bind(*inputs, **settings)
        return results if equation.primitive.multiple_results else [results]

    def _scan(self, equation: Any, inputs: list[Any]) -> list[Any]:
        settings, body = equation.params, equation.params["jaxpr"]
        # settings count them otherwise in each version of JAX: rows have an axis more than inside
        rows = sum(_ranks_differ(equation.invars, body.jaxpr.invars))
        carried = len(equation.outvars) - sum(_ranks_differ(equation.outvars, body.jaxpr.outvars))
        last = len(inputs) - rows
        first = last - carried

        def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(body, [*inputs[:first], *carry, *row])
            return results[:carried], results[carried:]

        carry, found = lax.scan(
            step, inputs[first:last], inputs[last:],
            settings["length"], settings["reverse"], settings["unroll"],
        )  # fmt: skip
        return [*carry, *found]

    def _while(self, settings: dict[str, Any], inputs: list[Any]) -> list[Any]:
        first, last = (
            settings["cond_nconsts"],
            settings["cond_nconsts"] + settings["body_nconsts"],
        )
        of_test, of_body, carry = inputs[:first], inputs[first:last], inputs[last:]
        found: list[Any] = lax.while_loop(
            lambda carry: self.run(settings["cond_jaxpr"], [*of_test, *carry])[0],
            lambda carry: self.run(settings["body_jaxpr"], [*of_body, *carry]),
            carry,
        )
        return found


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def _has_rule(equation: Any) -> bool:
    """Return whether a rule exists for an operation: in float32, and for integer powers only."""
    if equation.primitive.name == "pow":
        exponent = equation.invars[1].aval.dtype
        if not (jnp.issubdtype(exponent, jnp.integer) and np.can_cast(exponent, np.int32)):
            return False
    floats = [v for v in (*equation.invars, *equation.outvars) if _is_float(v)]
    return equation.primitive.name in RULES and all(v.aval.dtype == np.float32 for v in floats)


def _ranks_differ(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
    return [a.aval.ndim != b.aval.ndim for a, b in zip(outside, inside, strict=True)]


def _adds_once(equation: Any) -> bool:
    """Return whether a scatter adds to no element twice, so that order does not matter."""
    return equation.primitive.name == "scatter-add" and equation.params["unique_indices"]


def _closed(jaxpr: Any) -> Any:
    return ClosedJaxpr(jaxpr, ()) if isinstance(jaxpr, Jaxpr) else jaxpr
