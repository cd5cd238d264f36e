"""What each operation of JAX becomes: itself, or single operations, sums and products of ours."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.same_bits.elementary import Arithmetic
from lockstep.same_bits.products import Product, convolution
from lockstep.same_bits.sums import scatter_add, total


@dataclass(frozen=True)
class Numbers:
    """What the rules of a program compute with."""

    arithmetic: Arithmetic
    product: Product


Rule = Callable[[Numbers, list[Any], dict[str, Any]], jax.Array]

# Results that are rounded in one way, or are some of the operands: whatever computes them.
ONE_WAY = {
    "abs", "add", "add_any", "all_gather", "and", "argmax", "argmin", "bitcast_convert_type",
    "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copy",
    "dynamic_slice", "dynamic_update_slice", "eq", "floor", "gather", "ge", "gt", "iota",
    "is_finite", "le", "lt", "max", "min", "ne", "neg", "pad", "reduce_and", "reduce_max",
    "reduce_min", "reduce_or", "reduce_precision", "reduce_window_max", "reshape", "rev", "round",
    "scatter", "scatter-max", "scatter-min", "select_n", "sharding_constraint", "sign", "slice",
    "sort", "split", "squeeze", "stack", "stop_gradient", "sub", "tile", "top_k", "transpose",
    "unstack",
}  # fmt: skip


def _of(function: Callable[..., jax.Array]) -> Rule:
    """Return the rule of an operation that is a function of `Arithmetic`."""
    return lambda numbers, inputs, _: function(numbers.arithmetic, *inputs)


def _apart(operation: Any) -> Rule:
    """Return the rule of an operation that is rounded in one way, unless it is joined to others."""
    return lambda numbers, inputs, _: numbers.arithmetic.apart(operation(*inputs))


def _reciprocal_root(numbers: Numbers, inputs: list[Any], _: dict[str, Any]) -> jax.Array:
    root = numbers.arithmetic.root(inputs[0])
    return numbers.arithmetic.over(lax.full_like(root, 1), root)


def _scatter_add(_: Numbers, inputs: list[Any], settings: dict[str, Any]) -> jax.Array:
    def bind(x: jax.Array, at: jax.Array, updates: jax.Array) -> jax.Array:
        return lax.scatter_add(
            x, at, updates, settings["dimension_numbers"], mode=settings["mode"],
            indices_are_sorted=settings["indices_are_sorted"],
        )  # fmt: skip

    return scatter_add(bind, *inputs)


RULES: dict[str, Rule] = {
    "mul": _apart(lax.mul),
    "div": _of(Arithmetic.over),
    "square": _apart(lax.square),
    "sqrt": _of(Arithmetic.root),
    "rsqrt": _reciprocal_root,
    "reduce_sum": lambda _, inputs, settings: total(*inputs, settings["axes"]),
    "dot_general": lambda numbers, inputs, settings: numbers.product(
        *inputs, settings["dimension_numbers"]
    ),
    "conv_general_dilated": lambda _, inputs, settings: convolution(*inputs, settings),
    "cumsum": lambda _, inputs, settings: lax.associative_scan(
        lax.add, inputs[0], settings["reverse"], axis=settings["axis"]
    ),
    "integer_pow": lambda numbers, inputs, settings: numbers.arithmetic.integer_power(
        *inputs, settings["y"]
    ),
    "pow": _of(Arithmetic.power),
    "cos": _of(Arithmetic.cosine),
    "sin": _of(Arithmetic.sine),
    "tanh": _of(Arithmetic.tangent),
    "exp": _of(Arithmetic.exponential),
    "log": _of(Arithmetic.logarithm),
    "log1p": _of(Arithmetic.logarithm_of_one_more),
    "erf_inv": _of(Arithmetic.inverse_error_function),
    "logistic": _of(Arithmetic.logistic),
    "scatter-add": _scatter_add,
}


def is_exact(equation: Any) -> bool:
    """Return whether an operation gives the same bits as it is: rounded in one way, or no floats.

    A scatter that adds to no element twice does, too.
    """
    name = equation.primitive.name
    floats = any(map(_is_float, (*equation.invars, *equation.outvars)))
    adds_once = name == "scatter-add" and equation.params["unique_indices"]
    return not floats or name in ONE_WAY or adds_once


def has_rule(equation: Any) -> bool:
    """Return whether a rule exists: of float32 and bfloat16, and for integer powers only."""
    if equation.primitive.name == "pow":
        exponent = equation.invars[1].aval.dtype
        if not (jnp.issubdtype(exponent, jnp.integer) and np.can_cast(exponent, np.int32)):
            return False
    floats = [v.aval.dtype for v in (*equation.invars, *equation.outvars) if _is_float(v)]
    return equation.primitive.name in RULES and all(d in (np.float32, jnp.bfloat16) for d in floats)


def apply_rule(numbers: Numbers, equation: Any, inputs: list[Any]) -> jax.Array:
    """Return what an operation's rule gives; of bfloat16 in float32, rounded once at the end."""
    wide = [
        lax.convert_element_type(x, np.float32) if x.dtype == jnp.bfloat16 else x for x in inputs
    ]
    result = RULES[equation.primitive.name](numbers, wide, equation.params)
    return lax.convert_element_type(result, equation.outvars[0].aval.dtype)


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
