"""What a decoded update becomes before it is scaled by the learning rate."""

import jax
import jax.numpy as jnp

TINY = 1e-30  # what is all zeros stays so
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of x, x^3 and x^5
NEWTON_SCHULZ_STEPS = 5


def sign(x: jax.Array) -> jax.Array:
    """Every element 1, -1 or 0, as in DeMo and DisTrO."""
    return jnp.sign(x)


def rms(x: jax.Array) -> jax.Array:
    """x / rms(x): as long as the sign, in the direction of x."""
    return x / (jnp.sqrt(jnp.mean(jnp.square(x))) + TINY)


def orthogonal(x: jax.Array) -> jax.Array:
    """The orthogonal matrix nearest to each matrix of the last two axes, with an rms of about 1.

        U V^T * sqrt(the longer side), of x = U S V^T

    Five steps of a Newton-Schulz iteration, as in Muon, which leave singular values between about
    0.7 and 1.2; all of them are matrix products.

    References:
      Jordan et al., Muon: An optimizer for hidden layers, https://kellerjordan.github.io/posts/muon/
    """
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / (jnp.linalg.norm(y, axis=(-2, -1), keepdims=True) + TINY)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    return (y.mT if tall else y) * max(x.shape[-2:]) ** 0.5


BY_NAME = {"sign": sign, "rms": rms, "orthogonal": orthogonal}
