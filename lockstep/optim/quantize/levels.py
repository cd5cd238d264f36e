"""One or two bits: signs, times a mean magnitude of their block, or times one of two."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.expect import expect_counts, expect_integer
from lockstep.optim.optimizer import Tree
from lockstep.optim.quantize.quantizer import (
    Code,
    counts,
    from_blocks,
    off_by,
    pack,
    to_blocks,
    unpack,
)


@dataclass(frozen=True)
class Levels:
    """Rounds to a sign times a level, which is a mean magnitude of elements of the block.

    With 1 bit, all magnitudes of a block become their mean. With 2 bits, magnitudes above that mean
    become their own mean, and the others theirs. No other levels leave a smaller squared error.
    bits / 8 bytes per element and 4 * bits for each block.

    The code is biased, so it needs error feedback, which adds what was left out to later messages.

    Attributes:
      bits: Bits of an element, 1 or 2.
      block: Elements that share their levels.

    References:
      Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes,
        https://arxiv.org/abs/1901.09847
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        expect_integer("bits", self.bits, lambda x: x in (1, 2), "1 or 2")
        expect_counts(block=self.block)

    def encode(self, x: jax.Array) -> Tree:
        """See `Quantizer.encode`."""
        x_NB = to_blocks(x, self.block)
        real_NB = np.arange(x_NB.shape[1]) < counts(x.size, self.block)
        negative_NB = jnp.signbit(x_NB)
        if self.bits == 1:
            level_N1 = jnp.sum(jnp.abs(x_NB), axis=1, keepdims=True) / counts(x.size, self.block)
            return Code(level_N1, pack(negative_NB, x.size, 1))
        level_N2, large_NB = two_levels(jnp.abs(x_NB), real_NB)
        number_NB = negative_NB.astype(jnp.uint8) | large_NB.astype(jnp.uint8) << 1
        return Code(level_N2, pack(number_NB, x.size, 2))

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        """See `Quantizer.decode`."""
        number_NB = unpack(code.packed, math.prod(shape), self.bits, self.block)
        magnitude_NB = level_of(code.scale, number_NB >> 1)
        return from_blocks(jnp.where(number_NB & 1, -magnitude_NB, magnitude_NB), shape)

    def rounding(self, x: jax.Array) -> jax.Array:
        """See `Quantizer.rounding`."""
        return off_by(self, x)


def two_levels(
    magnitude_NB: jax.Array, real_NB: np.ndarray | bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return the mean magnitudes of each block's small and large elements, and which are large.

    Args:
      magnitude_NB: Magnitudes, in blocks.
      real_NB: Whether an element counts; the others are zeros.

    Returns:
      level_N2: float32, means of the magnitudes up to the block's mean and above it; 0 for none.
      large_NB: bool, whether a magnitude is above the block's mean.
    """
    counted_NB = jnp.broadcast_to(real_NB, magnitude_NB.shape)

    def mean(which_NB: jax.Array) -> jax.Array:
        total_N1 = jnp.sum(jnp.where(which_NB, magnitude_NB, 0.0), axis=1, keepdims=True)
        return total_N1 / jnp.maximum(jnp.sum(which_NB, axis=1, keepdims=True), 1)

    large_NB = magnitude_NB > mean(counted_NB)
    return jnp.concatenate([mean(counted_NB & ~large_NB), mean(large_NB)], axis=1), large_NB


def level_of(level_NL: jax.Array, number_NB: jax.Array) -> jax.Array:
    """Return the level of each element by its number: [N, B]."""
    return jnp.take_along_axis(level_NL, number_NB.astype(jnp.int32), axis=1)
