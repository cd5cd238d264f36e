"""The interface of quantizers, and the blocks and packed bits that most of them use.

Shapes: N blocks of B elements each, the last one padded; M elements of an array.
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Tree


@runtime_checkable
class Quantizer(Protocol):
    """Rounds an array to fewer bits; pure functions, whose shapes follow from the array's."""

    def encode(self, x: jax.Array) -> Tree:
        """Return what is sent of a float32 array: arrays of float32, bfloat16, float16 or uint8."""

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 array of this shape that a code stands for."""

    def rounding(self, x: jax.Array) -> jax.Array:
        """Return the largest error that an honest code of x may have, element by element."""


class Code(NamedTuple):
    """An array as numbers of few bits, which multiply the scale of their block.

    Attributes:
      scale: float32, one or more for each block.
      packed: uint8, the numbers in C order of the array, the first in the lowest bits.
    """

    scale: jax.Array
    packed: jax.Array


def off_by(quantizer: Quantizer, x: jax.Array) -> jax.Array:
    """Return the error of the code of x: the `rounding` of a quantizer that draws nothing."""
    return jnp.abs(quantizer.decode(quantizer.encode(x), x.shape) - x)


def to_blocks(x: jax.Array, block: int) -> jax.Array:
    """Return an array's elements in blocks, [N, B], the last one padded with zeros.

    Args:
      x: An array.
      block: B; all elements of a smaller array are one block.
    """
    x_M = x.ravel()
    width = _width(x_M.size, block)
    return jnp.pad(x_M, (0, -x_M.size % width)).reshape(-1, width)


def _width(size: int, block: int) -> int:
    return max(1, min(block, size))  # an array without elements has no blocks, of any width


def from_blocks(x_NB: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the array of this shape whose blocks these are."""
    return x_NB.ravel()[: math.prod(shape)].reshape(shape)


def counts(size: int, block: int) -> np.ndarray:
    """Return the number of an array's elements in each block: [N, 1]."""
    width = _width(size, block)
    return np.minimum(width, size - width * np.arange(-(-size // width)))[:, None]


def pack(number_NB: jax.Array, size: int, bits: int) -> jax.Array:
    """Return the first `size` numbers, of 1, 2, 4 or 8 bits each, in bytes: uint8."""
    each = 8 // bits
    number_M = number_NB.ravel()[:size].astype(jnp.uint8)
    number_M = jnp.pad(number_M, (0, -size % each))
    shifted = number_M.reshape(-1, each) << (bits * np.arange(each, dtype=np.uint8))
    return jnp.sum(shifted, axis=1, dtype=jnp.uint8)


def unpack(packed: jax.Array, size: int, bits: int, block: int) -> jax.Array:
    """Return the numbers that `pack` packed, in blocks: uint8 [N, B]."""
    shifts = bits * np.arange(8 // bits, dtype=np.uint8)
    number_M = (packed[:, None] >> shifts & np.uint8(2**bits - 1)).ravel()[:size]
    return to_blocks(number_M, block)
