"""Sums of many numbers in an order that the shape alone decides, or exact in any order."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.same_bits.elementary import NEAREST

ADDED = 16  # slices that are added one after the other
EXACT = 53  # bits of an integer that float64 holds


def total(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the sum over some axes, one after the other from the first.

    An axis of at most `ADDED` is added in its order. A longer one is cut into that many slices,
    padded with zeros; these are added in their order, and their sum is treated likewise. So
    neighbours are added side by side, which the vectors of a processor do at once.
    """
    shape = [size for axis, size in enumerate(x.shape) if axis not in axes]
    for axis in sorted(axes):
        if not x.shape[axis]:
            return jnp.zeros(shape, x.dtype)
        while x.shape[axis] > 1:
            width = -(-x.shape[axis] // ADDED)
            x = in_order(pieces(x, axis, width))
    return x.reshape(shape)


def pieces(x: jax.Array, axis: int, width: int) -> list[jax.Array]:
    """Return an array to sum, cut along an axis into pieces of this width, padded with zeros."""
    size = x.shape[axis]
    x = padded(x, axis, -size % width)
    return [lax.slice_in_dim(x, at, at + width, axis=axis) for at in range(0, size, width)]


def padded(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Return an array to sum with `count` zeros after an axis."""
    if not count:
        return x
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])


def in_order(terms: list[jax.Array]) -> jax.Array:
    """Return the sum of arrays, added one after the other."""
    result = terms[0]
    for term in terms[1:]:
        result = lax.add(result, term)
    return result


def scatter_add(
    bind: Callable[..., jax.Array], x: jax.Array, at: jax.Array, updates: jax.Array
) -> jax.Array:
    """Return float32 x with N updates added at places that may be named more than once.

    The updates become integers of 53 - log2 N bits on one power of two, whose sums are exact in any
    order; each sum is rounded to float32 once, and added to x. `bind` is the scatter of an array,
    places and updates, of any type.
    """
    with jax.enable_x64(True):
        counts, unit = _counts_of(updates)
        sums = bind(jnp.zeros(x.shape, np.int64), at, counts)
        scaled = lax.mul(_wide(sums), jnp.broadcast_to(unit.reshape(()), x.shape))
        return lax.add(x, lax.convert_element_type(scaled, np.float32))


def add_once(x: jax.Array, at: jax.Array, updates: jax.Array, axis: int) -> jax.Array:
    """Return what `scatter_add` does with one update in each row along an axis, 1 long there.

    Places are compared with the named ones, which takes no memory; integers take twice that of x.
    """
    with jax.enable_x64(True):
        counts, unit = _counts_of(updates)
        scaled = lax.mul(_wide(counts), jnp.broadcast_to(unit, counts.shape))
        nothing = lax.mul(unit, lax.full_like(unit, 0.0))  # NaN if an update is not finite
        scaled, nothing = (lax.convert_element_type(z, np.float32) for z in (scaled, nothing))
    is_named = lax.broadcasted_iota(at.dtype, x.shape, axis) == at
    return lax.add(x, jnp.where(is_named, scaled, nothing))


def _counts_of(updates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return updates as int64 numbers of a unit, whose sums are exact, and the unit."""
    bits = EXACT - math.ceil(math.log2(max(2, updates.size)))
    unit = unit_of(updates, tuple(range(updates.ndim)), bits)
    counts = lax.round(lax.div(_wide(updates), jnp.broadcast_to(unit, updates.shape)), NEAREST)
    return lax.convert_element_type(counts, np.int64), unit


def unit_of(x: jax.Array, axes: tuple[int, ...], bits: int) -> jax.Array:
    """Return the unit of an exact sum: the power of two of which numbers are at most 2^bits.

    It is that of the largest magnitude; the axes are 1 long in it. NaN if a number is not finite.
    """
    largest = jnp.max(lax.abs(x), axes, keepdims=True, initial=0)
    exponent = lax.bitcast_convert_type(largest, np.int32) >> np.int32(23)  # |x| < 2**(it - 126)
    biased = lax.convert_element_type(exponent, np.int64) + np.int64(1023 - 126 - bits)
    unit = lax.bitcast_convert_type(biased << np.int64(52), np.float64)
    return lax.select(lax.eq(exponent, np.int32(255)), lax.full_like(unit, math.nan), unit)


def rounded(x: jax.Array, unit: jax.Array) -> jax.Array:
    """Return float32 x as float64 for an exact sum, rounded to multiples of a power of two.

    The sum with 1.5 * 2^52 units has no room for less than one.
    """
    wide = _wide(x)
    shift = jnp.broadcast_to(lax.mul(unit, lax.full_like(unit, 1.5 * 2.0**52)), x.shape)
    return lax.sub(lax.add(wide, shift), shift)


def _wide(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, np.float64)
