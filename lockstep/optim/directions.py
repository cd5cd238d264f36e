"""Directions and lengths of vectors, huge ones too."""

import jax
import jax.numpy as jnp
import numpy as np

LENGTH_UNIT = 2.0**24  # the unit of `Sized.length`: a norm of many large numbers exceeds float32


def near_one(x: jax.Array, axis: int | tuple[int, ...] | None = None) -> jax.Array:
    """Return the power of two that brings the largest magnitude of a vector x to between 1 and 4.

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
      length: The lengths in units of `LENGTH_UNIT`. Below 2**-102, a length is zero.
    """

    def __init__(self, x: jax.Array, axis: tuple[int, ...]):
        scale = near_one(x, axis)
        self._near = x * scale
        self._norm = jnp.sqrt(jnp.sum(jnp.square(self._near), axis=axis, keepdims=True))
        self.length = self._norm * (np.float32(1 / LENGTH_UNIT) / scale)

    @property
    def direction(self) -> jax.Array:
        """The unit vectors, zeros where a vector is zero."""
        return self._near * inverse(self._norm)

    def with_length(self, length: jax.Array) -> jax.Array:
        """Return vectors of these directions and lengths, in units of `LENGTH_UNIT`."""
        return self._near * LENGTH_UNIT * (length * inverse(self._norm))


def inverse(norm: jax.Array) -> jax.Array:
    """Return the inverse of a vector's length, 1 / norm, and 0 for 0."""
    return jnp.where(norm > 0, 1.0 / jnp.where(norm > 0, norm, 1.0), 0.0)


LEAST_NORM = 1e-30  # zeros stay zeros, instead of 0 / 0
# Muon's coefficients of x, x^3 and x^5: they do not converge to 1, but reach its neighbourhood in
# few steps, which is all that a direction needs.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonal(x: jax.Array) -> jax.Array:
    """Return each matrix's direction: the nearest orthogonal matrix, in the last two axes, rms 1.

        U V^T * sqrt(the longer side), of x = U S V^T

    Five steps of a Newton-Schulz iteration, as in Muon, which leave singular values between about
    0.7 and 1.2; all of them are matrix products.

    References:
      Jordan et al., Muon: An optimizer for hidden layers, https://kellerjordan.github.io/posts/muon/
    """
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x  # the products are of the shorter side
    y = y * near_one(y, (-2, -1))  # squares of a huge gradient would overflow
    y = y / (jnp.linalg.norm(y, axis=(-2, -1), keepdims=True) + LEAST_NORM)
    a, b, c = NEWTON_SCHULZ
    by_rows = (((y.ndim - 1,), (y.ndim - 1,)), (tuple(range(y.ndim - 2)),) * 2)

    def step(_: int, y: jax.Array) -> jax.Array:
        square = jax.lax.dot_general(y, y, by_rows)  # y y^T
        fourth = jax.lax.dot_general(square, square, by_rows)  # rows serve: `square` is symmetric
        return a * y + (b * square + c * fourth) @ y

    y = jax.lax.fori_loop(0, NEWTON_SCHULZ_STEPS, step, y)
    nearest: jax.Array = (y.mT if tall else y) * max(x.shape[-2:]) ** 0.5
    return nearest
