"""Magnitudes whose squares do not overflow: numbers are scaled by powers of two, which is exact.

A finite float32 number may be as large as 3e38, and the square of 2e19 is already infinite. Scaling
by a power of two rounds nothing, so that ordinary numbers give the same bits with it as without.
"""

import jax
import jax.numpy as jnp
import numpy as np

UNIT = 2.0**24  # the unit of `Sized.length`: a norm of many large numbers exceeds float32


def near_one(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Return the power of two that brings the largest magnitude of x to between 1 and 4.

    At most 2**127, so magnitudes below 2**-126 stay below 2; zeros stay zeros.

    Args:
      x: float32.
      axis: Axes over which the largest is taken, each 1 long in the result; None for all.
    """
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None, initial=0.0)
    # The exponent's bits, biased by 127; a logarithm would be an approximation, which differs
    # between machines.
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23
    return jax.lax.bitcast_convert_type(jnp.clip(254 - exponent, 1, 254) << 23, jnp.float32)


class Sized:
    """Vectors as their directions and lengths, L2.

    Attributes:
      length: The lengths in units of `UNIT`. Below 2**-102, a length is zero.
    """

    def __init__(self, x: jax.Array, axis: tuple[int, ...]):
        near = near_one(x, axis)
        self._near = x * near
        self._norm = jnp.sqrt(jnp.sum(jnp.square(self._near), axis=axis, keepdims=True))
        self.length = self._norm * (np.float32(1 / UNIT) / near)

    @property
    def direction(self) -> jax.Array:
        """The unit vectors, zeros where a vector is zero."""
        return self._near * inverse(self._norm)

    def with_length(self, length: jax.Array) -> jax.Array:
        """Return vectors of these directions and lengths, in units of `UNIT`."""
        return self._near * UNIT * (length * inverse(self._norm))


def inverse(norm: jax.Array) -> jax.Array:
    """Return 1 / norm, and 0 for 0."""
    return jnp.where(norm > 0, 1.0 / jnp.where(norm > 0, norm, 1.0), 0.0)
