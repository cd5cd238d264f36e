"""What each operation of JAX becomes, where its bits could otherwise differ between machines."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from lockstep.programs.same_bits.arithmetic import Arithmetic

Rule = Callable[[Arithmetic, list[Any], dict[str, Any]], list[Any]]

# Results that are rounded in one way, or are some of the operands: whatever computes them.
ONE_WAY = {
    "abs", "add", "all_gather", "and", "argmax", "argmin", "bitcast_convert_type",
    "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copy",
    "dynamic_slice", "dynamic_update_slice", "eq", "floor", "gather", "ge", "gt", "iota",
    "is_finite", "le", "lt", "max", "min", "ne", "neg", "pad", "reduce_and", "reduce_max",
    "reduce_min", "reduce_or", "reduce_precision", "reshape", "rev", "round", "scatter",
    "scatter-max", "scatter-min", "select_n", "sharding_constraint", "sign", "slice", "sort",
    "split", "squeeze", "stack", "stop_gradient", "sub", "tile", "top_k", "transpose", "unstack",
}  # fmt: skip


def _apart(operation: Any) -> Rule:
    """Return the rule of an operation that is rounded in one way, unless it is joined to others."""

    def rule(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
        return [arithmetic.apart(operation(*inputs))]

    return rule


def _sum(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    return [arithmetic.total(inputs[0], settings["axes"])]


def _dot(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    return [arithmetic.product(*inputs, settings["dimension_numbers"])]


def _integer_pow(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    return [arithmetic.integer_power(inputs[0], settings["y"])]


def _pow(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    return [arithmetic.power(*inputs)]


def _div(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    return [arithmetic.over(*inputs)]


def _cos(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    return [arithmetic.cosine(inputs[0])]


def _exp(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    return [arithmetic.exponential(inputs[0])]


def _rsqrt(arithmetic: Arithmetic, inputs: list[Any], settings: dict[str, Any]) -> list[Any]:
    root: jax.Array = arithmetic.apart(lax.sqrt(inputs[0]))
    return [arithmetic.over(lax.full_like(root, 1), root)]


RULES: dict[str, Rule] = {
    "mul": _apart(lax.mul),
    "div": _div,
    "square": _apart(lax.square),
    "sqrt": _apart(lax.sqrt),
    "rsqrt": _rsqrt,
    "reduce_sum": _sum,
    "dot_general": _dot,
    "integer_pow": _integer_pow,
    "pow": _pow,
    "cos": _cos,
    "exp": _exp,
}
