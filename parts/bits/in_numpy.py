"""Single operations in NumPy, which has nothing in common with a device or a compiler.

The rule of an operation is made of few: sums, products and quotients of two numbers, integers, and
moves. So whoever doubts a device's number recomputes the rule here, and whoever records a step
leaves moves to NumPy: to compile each of their shapes takes longer than a step.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from parts.bits.opened import FLIP, Arrays, on_host

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
    "clamp": lambda low, x, high, _: np.minimum(np.maximum(x, low), high),
    "eq": _alike(np.equal), "floor": _alike(np.floor), "ge": _alike(np.greater_equal),
    "gt": _alike(np.greater), "is_finite": _alike(np.isfinite), "le": _alike(np.less_equal),
    "lt": _alike(np.less), "max": _alike(np.maximum), "min": _alike(np.minimum),
    "mul": _alike(np.multiply), "ne": _alike(np.not_equal), "neg": _alike(np.negative),
    "not": _alike(np.bitwise_not), "or": _alike(np.bitwise_or),
    "reduce_and": _over_axes(np.all), "reduce_max": _over_axes(np.max),
    "reduce_min": _over_axes(np.min), "reduce_or": _over_axes(np.any), "rem": _alike(np.fmod),
    "shift_left": _alike(np.left_shift), "shift_right_arithmetic": _alike(np.right_shift),
    "sign": _alike(np.sign), "sqrt": _alike(np.sqrt), "square": _alike(np.square),
    "sub": _alike(np.subtract), "xor": _alike(np.bitwise_xor),
}  # fmt: skip
# What only a rule asks for, of numbers for which it is exact or rounded in one way
OF_RULES: dict[str, InNumPy] = {
    "bitcast_convert_type": lambda x, equation: x.view(equation.params["new_dtype"]),
    "convert_element_type": _alike(lambda x: x), "div": _alike(np.divide), "dot_general": _dot,
    "platform_index": _platform, "round": _alike(np.rint),
}  # fmt: skip
ARITHMETIC = {"add", "add_any", "convert_element_type", "div", "mul", "sqrt", "square", "sub"}


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
    if equation.params.get("name") == FLIP:  # NumPy's product is taken to be whole
        return inputs
    function = MOVES.get(name) or SINGLE.get(name) or OF_RULES.get(name)
    if function is None or _differs(equation):
        results = equation.primitive.bind(*inputs, **equation.params)
        return [on_host(x) for x in (results if equation.primitive.multiple_results else [results])]
    if name in ARITHMETIC:
        inputs = [_flushed(x) for x in inputs]
    with np.errstate(all="ignore"):
        results = function(*inputs, equation)
    if name == "split":
        return results
    result = np.asarray(results).astype(avals[0].dtype, copy=False)
    return [_flushed(result) if name in ARITHMETIC else result]


def _differs(equation: Any) -> bool:
    """Return whether NumPy has another result: of what does not fit an integer, and of paddings."""
    types = [str(variable.aval.dtype) for variable in (*equation.invars, *equation.outvars)]
    if equation.primitive.name == "pad":
        return any(
            min(low, high) < 0 or inner for low, high, inner in equation.params["padding_config"]
        )
    return (
        equation.primitive.name == "convert_element_type"
        and "float" in types[0]
        and "int" in types[1]
    )


def _flushed(x: np.ndarray) -> np.ndarray:
    """Return NumPy numbers of which subnormal ones are 0, as on a CPU of XLA."""
    if x.dtype.kind != "f" or x.dtype.itemsize < 4:
        return x
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)
