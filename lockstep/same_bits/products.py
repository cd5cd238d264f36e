"""Products of matrices that are exact but for the rounding of their operands.

Operands become integers on a power of two. Their products and all sums of these are integers that
a floating-point number holds, so that every order gives the same, whatever computes it.

The precision is how many bits an operand keeps:

- 20: in float64, on a scale of its own for each vector that is summed over. Of K terms operands
  keep (53 - log2 K) / 2 bits, at most float32's 24: 23 of 64 terms, 20 of 4,096.
- 8: in float32, on a scale for each block of 256 terms of such a vector. Sums of a block are exact,
  since 2 * 8 + log2 256 = 24, and those of blocks are added in order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.same_bits.sums import EXACT, in_order, padded, rounded, unit_of

DotDimensions = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]
Product = Callable[[jax.Array, jax.Array, DotDimensions], jax.Array]
MATRICES: DotDimensions = ((1,), (0,)), ((), ())
# A kernel's gradient, as JAX has it: of outputs and inputs, over their rows, and then transposed.
# XLA's libraries are quicker with `MATRICES`, of which nothing is transposed but the inputs.
OF_A_KERNEL: DotDimensions = ((0,), (0,)), ((), ())
FEW_BITS = 8
BLOCK = 2 ** (24 - 2 * FEW_BITS)  # terms
UNITS = np.float32(1.5 * 2.0**23)
AT_ONCE = 16  # blocks whose products are held at a time
LEAST = -63  # a unit is at least 2^this, since products of units must be normal numbers
# Named, since JAX's default is the user's: the operations of a run by rules are the same for all.
_product = partial(lax.dot_general, precision=lax.Precision.HIGHEST)
_convolution = partial(lax.conv_general_dilated, precision=lax.Precision.HIGHEST)


def in_float64(x: jax.Array, y: jax.Array, dimensions: DotDimensions) -> jax.Array:
    """Return `lax.dot_general` of float32 arrays in 20 bits, as above.

    `dimensions` are as there: ((contracting of x, of y), (batch of x, of y)).
    """
    (over_x, over_y), _ = dimensions
    terms = math.prod(x.shape[axis] for axis in over_x)
    bits = _bits_kept(terms)
    with jax.enable_x64(True):
        operands = [rounded(z, unit_of(z, axes, bits)) for z, axes in ((x, over_x), (y, over_y))]
        return lax.convert_element_type(_product(*operands, dimensions), np.float32)


def in_blocks(x: jax.Array, y: jax.Array, dimensions: DotDimensions) -> jax.Array:
    """Return `lax.dot_general` of float32 arrays in 8 bits, as above; arguments as `in_float64`.

    What is below 2^-64 counts as 0, and a block with numbers of 2^111 and more as NaN.
    """
    if dimensions == OF_A_KERNEL and x.ndim == y.ndim == 2:
        return in_blocks(y.T, x, MATRICES).T
    (over_x, over_y), (batch_x, batch_y) = dimensions
    x, (axis_x,), batch_x = _one_axis(x, over_x, batch_x)
    y, (axis_y,), batch_y = _one_axis(y, over_y, batch_y)
    count = -(-x.shape[axis_x] // BLOCK)
    if count <= 1:
        operands = _few_bits(x, axis_x), _few_bits(y, axis_y)
        return _dot(*operands, (((axis_x,), (axis_y,)), (batch_x, batch_y)))
    x, y = _blocks_first(x, axis_x, count), _blocks_first(y, axis_y, count)
    batch_x, batch_y = (tuple(axis + 1 for axis in batch) for batch in (batch_x, batch_y))
    inner = ((axis_x + 1,), (axis_y + 1,)), (batch_x, batch_y)
    if count > AT_ONCE:
        first = _dot(x[0], y[0], _one_less(inner))
        return lax.scan(
            lambda total, pair: (lax.add(total, _dot(*pair, _one_less(inner))), None),
            first, (x[1:], y[1:]),
        )[0]  # fmt: skip
    (over, (batch_x, batch_y)) = inner
    products = _dot(x, y, (over, ((0, *batch_x), (0, *batch_y))))
    return in_order([products[block] for block in range(count)])


def convolution(x: jax.Array, kernel: jax.Array, settings: dict[str, Any]) -> jax.Array:
    """Return `lax.conv_general_dilated` of float32 arrays in float64, as `in_float64`.

    Windows overlap, so each operand is on one scale.
    """
    _, within, *window = settings["dimension_numbers"].rhs_spec
    terms = math.prod(kernel.shape[axis] for axis in (within, *window))
    bits = _bits_kept(terms)
    names = ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
             "feature_group_count", "batch_group_count")  # fmt: skip
    with jax.enable_x64(True):
        operands = [rounded(z, unit_of(z, tuple(range(z.ndim)), bits)) for z in (x, kernel)]
        exact = _convolution(*operands, **{name: settings[name] for name in names})
        return lax.convert_element_type(exact, np.float32)


@dataclass
class OneFlipped:
    """The product on a broken chip: of those of a program, as they are traced, one is wrong."""

    product: Product
    left: int  # products up to that one
    all_left: list[int] = field(default_factory=list)  # at each product, of this and its copies

    def __call__(self, x: jax.Array, y: jax.Array, dimensions: DotDimensions) -> jax.Array:
        """Return what `product` does; the wrong one with a flipped bit, in a loop at each turn."""
        self.left -= 1
        self.all_left.append(self.left)
        result = self.product(x, y, dimensions)
        return result if self.left else jax.jit(flipped_on_a_chip)(result)


def flipped_on_a_chip(x: jax.Array) -> jax.Array:
    """Return x with the highest bit of the fraction of one element flipped.

    It is in the midst of rows: their first token attends to none but itself.
    """
    place = np.unravel_index(x.size // 3, x.shape)
    bits = lax.bitcast_convert_type(x, np.uint32)
    return lax.bitcast_convert_type(bits.at[place].set(bits[place] ^ np.uint32(2**22)), np.float32)


PRODUCTS: dict[int, Product] = {20: in_float64, 8: in_blocks}


def product_of(bits: str, product_bits: int) -> Product | None:
    """Return the product of `[peers] bits` and `product_bits`; None where no step goes by rules."""
    return PRODUCTS[product_bits] if bits == "everywhere" else None


def _bits_kept(terms: int) -> int:
    """Return how many bits an operand keeps where float64 holds the sum of this many products."""
    return min(24, (EXACT - math.ceil(math.log2(max(1, terms)))) // 2)


def _one_less(dimensions: DotDimensions) -> DotDimensions:
    """Return dimensions of a product's arrays without their first axis."""
    (over, batch) = (tuple(tuple(a - 1 for a in axes) for axes in pair) for pair in dimensions)
    return over, batch


def _dot(x: jax.Array, y: jax.Array, dimensions: DotDimensions) -> jax.Array:
    """Return the matrix products of a block: of numbers that bfloat16 holds, too.

    An NVIDIA GPU's tensor cores multiply bfloat16 exactly and add in float32, which holds the sums.
    So they give the same number (tried on an H200), at several times the speed.
    """

    def in_float32(x: jax.Array, y: jax.Array) -> jax.Array:
        return _product(x, y, dimensions)

    def on_tensor_cores(x: jax.Array, y: jax.Array) -> jax.Array:
        operands = (lax.convert_element_type(z, jnp.bfloat16) for z in (x, y))
        return _product(*operands, dimensions, preferred_element_type=np.float32)

    return lax.platform_dependent(x, y, cuda=on_tensor_cores, default=in_float32)


def _one_axis(
    x: jax.Array, over: tuple[int, ...], batch: tuple[int, ...]
) -> tuple[jax.Array, tuple[int], tuple[int, ...]]:
    """Return a product's operand with its axes `over` joined to one, that axis, and its batch."""
    if len(over) == 1:
        return x, (over[0],), batch
    own = [axis for axis in range(x.ndim) if axis not in (*over, *batch)]
    transposed = lax.transpose(x, (*batch, *own, *over))
    lead = transposed.shape[: len(batch) + len(own)]
    joined = transposed.reshape(*lead, math.prod(x.shape[axis] for axis in over))
    return joined, (len(lead),), tuple(range(len(batch)))


def _blocks_first(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Return a product's operand in few bits, cut along an axis into `count` blocks first."""
    size = -(-x.shape[axis] // count)
    x = padded(x, axis, count * size - x.shape[axis])
    x = x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return jnp.moveaxis(_few_bits(x, axis + 1), axis, 0)


def _few_bits(x: jax.Array, axis: int) -> jax.Array:
    """Return a product's operand x rounded to `FEW_BITS` bits of the largest over an axis.

    The sum with `UNITS` units has no room for less than one.
    """
    largest = jnp.max(lax.abs(x), axis, keepdims=True, initial=0)
    bits = lax.bitcast_convert_type(largest, np.int32) & np.int32(0x7F800000)
    power = lax.bitcast_convert_type(bits, np.float32)  # infinite if a number is not finite
    shift = jnp.maximum(power * np.float32(UNITS * 2.0 ** (1 - FEW_BITS)), UNITS * 2.0**LEAST)
    shift = jnp.broadcast_to(shift, x.shape)
    return lax.sub(lax.add(x, shift), shift)  # an infinite one gives NaN
