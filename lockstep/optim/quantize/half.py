"""Half of the bits: bfloat16, or float16."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lockstep.optim.expect import expect_dtype
from lockstep.optim.optimizer import Tree
from lockstep.optim.quantize.quantizer import off_by


@dataclass(frozen=True)
class Half:
    """Rounds to the nearest number of a 16-bit type, at most its largest: 2 bytes per element.

    Attributes:
      dtype: bfloat16, with the range of float32 and 8 bits of precision; or float16, with 11 bits,
        up to 65,504.
    """

    dtype: jax.typing.DTypeLike

    def __post_init__(self) -> None:
        expect_dtype("dtype", self.dtype, jnp.bfloat16, jnp.float16)

    def encode(self, x: jax.Array) -> Tree:
        """See `Quantizer.encode`."""
        most = float(jnp.finfo(self.dtype).max)  # type: ignore[no-untyped-call]
        return jnp.clip(x, -most, most).astype(self.dtype)

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        """See `Quantizer.decode`."""
        half: jax.Array = code
        return half.astype(jnp.float32).reshape(shape)

    def rounding(self, x: jax.Array) -> jax.Array:
        """See `Quantizer.rounding`."""
        return off_by(self, x)
