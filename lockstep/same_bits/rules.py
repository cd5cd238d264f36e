"""What each operation of JAX becomes: itself, or single operations, sums and products of ours."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.same_bits.elementary import Arithmetic
from lockstep.same_bits.products import Product, convolution
from lockstep.same_bits.sums import add_once, scatter_add, total


@dataclass(frozen=True)
class Numbers:
    """What the rules of JAX's operations compute with."""

    arithmetic: Arithmetic
    product: Product


Rule = Callable[[Numbers, list[Any], dict[str, Any]], jax.Array]

# Types of operands and results, for which operations give the same bits as they are
INTEGERS = {"bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}
REAL = INTEGERS | {"float16", "bfloat16", "float32", "float64"}
RULED = {"float32", "bfloat16"}  # which rules take
# Of real numbers: results that are rounded in one way, or are some of the operands.
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
# Of integers alone, too: the last bits of a sum or product are the same in any order. A key is some
# of them, if its numbers are those of Threefry; the generators of other keys belong to devices.
OF_INTEGERS = {
    "clz", "conv_general_dilated", "cummax", "cummin", "cumprod", "cumsum", "device_put", "div",
    "dot_general", "integer_pow", "mul", "not", "or", "population_count", "random_bits",
    "random_clone", "random_fold_in", "random_seed", "random_split", "random_unwrap", "random_wrap",
    "reduce_prod", "reduce_sum", "reduce_window_min", "reduce_window_sum", "reduce_xor", "rem",
    "scatter-add", "scatter-mul", "scatter-sub", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "square", "threefry2x32", "xor",
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
    axis = _axis_of_one_each(inputs, settings)
    if axis is not None:
        x, *one_each = inputs
        shape = tuple(1 if i == axis else size for i, size in enumerate(x.shape))
        return add_once(x, *(z.reshape(shape) for z in one_each), axis)

    def bind(x: jax.Array, at: jax.Array, updates: jax.Array) -> jax.Array:
        return lax.scatter_add(
            x, at, updates, settings["dimension_numbers"], mode=settings["mode"],
            indices_are_sorted=settings["indices_are_sorted"],
        )  # fmt: skip

    return scatter_add(bind, *inputs)


def _axis_of_one_each(inputs: list[Any], settings: dict[str, Any]) -> int | None:
    """Return the axis along which a scatter, by its rule, has one update in each row; else None.

    The gradient of `take_along_axis` is such a scatter where one element of each row was taken.
    """
    x, at, updates = inputs
    numbers = settings["dimension_numbers"]
    axes, of_rows = numbers.scatter_dims_to_operand_dims, numbers.scatter_indices_batching_dims
    rows = tuple(axis for axis in range(x.ndim) if axis not in axes)
    is_one_each = (
        len(axes) == 1
        and numbers.operand_batching_dims == rows
        and of_rows == tuple(sorted(of_rows))
        and updates.size == math.prod(x.shape[axis] for axis in rows)
        and at.dtype == np.int32
        and settings["mode"] != lax.GatherScatterMode.CLIP  # which moves a place that is outside
    )
    return int(axes[0]) if is_one_each else None


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
    """Return whether an operation of these types needs no rule: it gives the same bits as it is.

    A scatter only if no place is named twice, and a sort if nothing that it moves is equal.
    """
    name, settings = equation.primitive.name, equation.params
    types = set(types_of(equation))
    if name == "scatter" and not settings["unique_indices"]:
        *places, _ = equation.invars[1].aval.shape
        if math.prod(places) > 1:
            return False
    if name == "sort" and not settings["is_stable"]:  # equal numbers are the same, but 0 and -0
        return types <= INTEGERS and settings["num_keys"] == len(equation.invars)
    adds_once = name == "scatter-add" and settings["unique_indices"]
    if name in ONE_WAY or adds_once:
        return types <= REAL | _threefry()
    return name in OF_INTEGERS and types <= INTEGERS | _threefry()


def has_rule(equation: Any) -> bool:
    """Return whether a rule exists: of float32 and bfloat16, and for integer powers only."""
    name, types = equation.primitive.name, types_of(equation)
    if name in ("pow", "scatter-add"):  # the exponent, the places
        kind = types.pop(1)
        if kind not in INTEGERS or name == "pow" and not np.can_cast(kind, np.int32):
            return False
    return name in RULES and RULED.issuperset(types)


def types_of(equation: Any) -> list[str]:
    """Return the names of the types of an operation's operands and results."""
    avals = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    return [str(getattr(aval, "dtype", aval)) for aval in avals]  # a token has none


def apply_rule(numbers: Numbers, equation: Any, inputs: list[Any]) -> jax.Array:
    """Return what an operation's rule gives; of bfloat16 in float32, rounded once at the end."""
    wide = [
        lax.convert_element_type(x, np.float32) if x.dtype == jnp.bfloat16 else x for x in inputs
    ]
    result = RULES[equation.primitive.name](numbers, wide, equation.params)
    return lax.convert_element_type(result, equation.outvars[0].aval.dtype)


@cache
def _threefry() -> set[str]:
    return {str(jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype)}
