"""Single operations in NumPy, which has nothing in common with a device or a compiler.

The rule of an operation is made of few: sums, products and quotients of two numbers, integers, and
moves. So whoever doubts a device's number recomputes the rule here, and whoever records a step
leaves moves to NumPy: to compile each of their shapes takes longer than a step.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from lockstep.same_bits.elementary import NEAREST
from parts.bits.opened import Arrays, on_host

InNumPy = Callable[..., Any]  # of arrays, and of the equation that asks for it


def _broadcast(x: np.ndarray, equation: Any) -> np.ndarray:
    shape, axes = equation.params["shape"], equation.params["broadcast_dimensions"]
    sizes = [x.shape[axes.index(axis)] if axis in axes else 1 for axis in range(len(shape))]
    return np.broadcast_to(x.reshape(sizes), shape)


def _reshaped(x: np.ndarray, equation: Any) -> np.ndarray:
    return x.reshape(equation.outvars[0].aval.shape)


def _slice(x: np.ndarray, equation: Any) -> np.ndarray:
    settings = equation.params
    strides = settings["strides"] or (1,) * x.ndim
    bounds = zip(settings["start_indices"], settings["limit_indices"], strides, strict=True)
    return x[tuple(slice(*bound) for bound in bounds)]


def _pad(x: np.ndarray, value: np.ndarray, equation: Any) -> np.ndarray:
    padding = equation.params["padding_config"]
    whole = np.full(equation.outvars[0].aval.shape, value, x.dtype)
    lows = [low for low, _, _ in padding]
    whole[tuple(slice(low, low + size) for low, size in zip(lows, x.shape, strict=True))] = x
    return whole


def _split(x: np.ndarray, equation: Any) -> Arrays:
    ends = np.cumsum(equation.params["sizes"])[:-1]
    return np.split(x, ends, equation.params["axis"])


def _iota(equation: Any) -> np.ndarray:
    aval, axis = equation.outvars[0].aval, equation.params["dimension"]
    sizes = [size if i == axis else 1 for i, size in enumerate(aval.shape)]
    return np.broadcast_to(np.arange(aval.shape[axis], dtype=aval.dtype).reshape(sizes), aval.shape)


def _dot(x: np.ndarray, y: np.ndarray, equation: Any) -> np.ndarray:
    """Return products of integers on powers of two, in NumPy: exact in float64, in any order."""
    (over_x, over_y), (batch_x, batch_y) = equation.params["dimension_numbers"]
    own_x = [axis for axis in range(x.ndim) if axis not in (*over_x, *batch_x)]
    own_y = [axis for axis in range(y.ndim) if axis not in (*over_y, *batch_y)]
    batch, over = ([x.shape[axis] for axis in axes] for axes in (batch_x, over_x))
    rows, columns = [x.shape[axis] for axis in own_x], [y.shape[axis] for axis in own_y]
    left = x.transpose(*batch_x, *own_x, *over_x).reshape(*batch, math.prod(rows), math.prod(over))
    right = y.transpose(*batch_y, *over_y, *own_y).reshape(*batch, left.shape[-1], -1)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    return exact.reshape(*batch, *rows, *columns)


def _platform(equation: Any) -> np.ndarray:
    """Return which branch of an operation is the CPU's, as NumPy takes it."""
    platforms = equation.params["platforms"]
    cpu = next((i for i, names in enumerate(platforms) if names and "cpu" in names), None)
    return np.asarray(platforms.index(None) if cpu is None else cpu, np.int32)


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a largest or smallest with -0 below 0, as XLA has them and NumPy has not."""

    def extreme(*inputs: np.ndarray, **axis: Any) -> np.ndarray:
        found = np.asarray(function(*inputs, **axis))
        if not is_real(found):
            return found
        integer = np.dtype(f"i{found.itemsize}")
        in_order = function(*(_turned(x.view(integer)) for x in inputs), **axis)
        return np.where(np.isnan(found), found, _turned(np.asarray(in_order)).view(found.dtype))

    return extreme


def _turned(bits: np.ndarray) -> np.ndarray:
    """Return the bits of numbers as integers in the order of the numbers, or these as bits."""
    return np.where(bits < 0, bits ^ np.iinfo(bits.dtype).max, bits)


def is_real(x: Any) -> bool:
    """Return whether an array is of real numbers, bfloat16's too."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _over_axes(function: Callable[..., np.ndarray]) -> InNumPy:
    return lambda x, equation: function(x, axis=equation.params["axes"])


def _alike(function: Callable[..., np.ndarray]) -> InNumPy:
    return lambda *inputs: function(*inputs[:-1])


# Arrays that are moved as they are
MOVES: dict[str, InNumPy] = {
    "broadcast_in_dim": _broadcast, "concatenate":
    lambda *inputs: np.concatenate(inputs[:-1], inputs[-1].params["dimension"]),
    "copy": _alike(lambda x: x), "expand_dims": _reshaped, "iota": _iota, "pad": _pad,
    "reshape": _reshaped, "rev": lambda x, equation: np.flip(x, equation.params["dimensions"]),
    "select_n": lambda which, *cases: np.choose(which, cases[:-1]) if len(cases) > 3
    else np.where(which, cases[1], cases[0]),
    "slice": _slice,
    "split": _split, "squeeze": _reshaped, "stop_gradient": _alike(lambda x: x),
    "transpose": lambda x, equation: x.transpose(equation.params["permutation"]),
}  # fmt: skip
# Of which integers are exact everywhere, and real numbers are rounded in one way
SINGLE: dict[str, InNumPy] = {
    "abs": _alike(np.abs), "add": _alike(np.add), "add_any": _alike(np.add),
    "and": _alike(np.bitwise_and), "ceil": _alike(np.ceil),
    "clamp": lambda low, x, high, _: _extreme(np.minimum)(_extreme(np.maximum)(x, low), high),
    "eq": _alike(np.equal), "floor": _alike(np.floor), "ge": _alike(np.greater_equal),
    "gt": _alike(np.greater), "is_finite": _alike(np.isfinite), "le": _alike(np.less_equal),
    "lt": _alike(np.less), "max": _alike(_extreme(np.maximum)), "min": _alike(_extreme(np.minimum)),
    "mul": _alike(np.multiply), "ne": _alike(np.not_equal), "neg": _alike(np.negative),
    "not": _alike(np.bitwise_not), "or": _alike(np.bitwise_or),
    "reduce_and": _over_axes(np.all), "reduce_max": _over_axes(_extreme(np.max)),
    "reduce_min": _over_axes(_extreme(np.min)), "reduce_or": _over_axes(np.any),
    "rem": lambda x, y, _: np.where(y == 0, x, np.fmod(x, y | (y == 0))),
    "shift_left": _alike(np.left_shift), "shift_right_arithmetic": _alike(np.right_shift),
    "sign": lambda x, _: np.copysign(np.sign(x), x) if is_real(x) else np.sign(x),
    "sqrt": _alike(np.sqrt), "square": _alike(np.square),
    "sub": _alike(np.subtract), "xor": _alike(np.bitwise_xor),
}  # fmt: skip
# What only a rule asks for, of numbers for which it is exact or rounded in one way
OF_RULES: dict[str, InNumPy] = {
    "bitcast_convert_type": lambda x, equation: x.view(equation.params["new_dtype"]),
    "convert_element_type": _alike(lambda x: x), "div": _alike(np.divide), "dot_general": _dot,
    "platform_index": _platform, "round": _alike(np.rint),
}  # fmt: skip
# Of which subnormal numbers are 0
FLUSHED = {
    "add", "add_any", "ceil", "clamp", "convert_element_type", "div", "eq", "floor", "ge", "gt",
    "le", "lt", "max", "min", "mul", "ne", "reduce_max", "reduce_min", "sign", "sqrt", "square",
    "sub",
}  # fmt: skip


def moves(equation: Any) -> bool:
    """Return whether an operation moves values, or is one of integers that NumPy has."""
    name = equation.primitive.name
    types = [variable.aval.dtype for variable in (*equation.invars, *equation.outvars)]
    is_plain = all(isinstance(dtype, np.dtype) for dtype in types)
    whole = is_plain and all(dtype.kind in "iub" for dtype in types)
    return is_plain and (name in MOVES or (name in SINGLE and whole))


def in_numpy(equation: Any, inputs: Arrays) -> Arrays:
    """Return the results of an operation by NumPy; of one that it has not, by JAX."""
    name, avals = equation.primitive.name, [variable.aval for variable in equation.outvars]
    function = MOVES.get(name) or SINGLE.get(name) or OF_RULES.get(name)
    if function is None or _differs(equation):
        results = equation.primitive.bind(*inputs, **equation.params)
        return [on_host(x) for x in (results if equation.primitive.multiple_results else [results])]
    widens = name == "convert_element_type" and "bfloat16" in _types(equation)  # or cuts
    flushes = name in FLUSHED and not widens
    with np.errstate(all="ignore"):
        inputs = [_flushed(x) for x in inputs] if flushes else inputs
        results = function(*inputs, equation)
        if name == "split":
            return results
        result = np.asarray(results).astype(avals[0].dtype, copy=False)
        return [_flushed(result) if flushes else result]


def _types(equation: Any) -> list[str]:
    return [str(variable.aval.dtype) for variable in (*equation.invars, *equation.outvars)]


def _differs(equation: Any) -> bool:
    """Return whether NumPy has another result: of paddings, ties, and what does not fit a type."""
    name, settings, types = equation.primitive.name, equation.params, _types(equation)
    if name == "round":
        return settings["rounding_method"] != NEAREST
    if name == "pad":
        return any(min(low, high) < 0 or inner for low, high, inner in settings["padding_config"])
    if name in ("div", "dot_general"):
        return "int" in types[0]
    if name == "shift_right_arithmetic":
        return types[0].startswith("uint")
    return name == "convert_element_type" and "float" in types[0] and "int" in types[1]


def _flushed(x: np.ndarray) -> np.ndarray:
    """Return numbers of which subnormal ones are 0, as on a CPU of XLA."""
    if not is_real(x) or x.dtype == np.float16:
        return x
    return np.where(np.abs(x) < jnp.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)
