"""QSGD: levels below the norm of a block, drawn so that the mean of what is sent is right."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lockstep.optim.expect import expect_counts, expect_integer
from lockstep.optim.optimizer import Tree
from lockstep.optim.quantize.quantizer import Code, from_blocks, pack, to_blocks, unpack


@dataclass(frozen=True)
class QSGD:
    """Rounds at random to a neighbouring level, so that the expected value is x.

        s     = 2^(bits - 1) - 1
        level = floor(s |x| / norm + u),  u uniform in [0, 1)        norm: L2, of a block
        q     = sign(x) * norm * level / s

    bits / 8 bytes per element, a sign and a level, and 4 for each block. The draw is a function of
    x alone, all of its bits, so a replay repeats it and peers draw differently.

    Attributes:
      bits: Bits of an element, 8 or 4, its sign included.
      block: Elements that share a norm.

    References:
      Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding,
        https://arxiv.org/abs/1610.02132
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        expect_integer("bits", self.bits, lambda x: x in (4, 8), "4 or 8")
        expect_counts(block=self.block)

    def encode(self, x: jax.Array) -> Tree:
        """See `Quantizer.encode`."""
        x_NB = to_blocks(x, self.block)
        norm_N1 = _norm(x_NB)
        share_NB = jnp.abs(x_NB) / jnp.where(norm_N1 > 0, norm_N1, 1.0)
        level_NB = jnp.floor(self._levels * share_NB + jax.random.uniform(_key(x), x_NB.shape))
        level_NB = jnp.minimum(level_NB, self._levels).astype(jnp.uint8)
        sign_NB = jnp.signbit(x_NB).astype(jnp.uint8)
        return Code(norm_N1, pack(level_NB | sign_NB << (self.bits - 1), x.size, self.bits))

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        """See `Quantizer.decode`."""
        number_NB = unpack(code.packed, math.prod(shape), self.bits, self.block)
        sign_NB = number_NB >> (self.bits - 1)
        level_NB = number_NB & jnp.uint8(self._levels)
        q_NB = jnp.where(sign_NB, -1.0, 1.0) * level_NB * (code.scale / self._levels)
        return from_blocks(q_NB, shape)

    def rounding(self, x: jax.Array) -> jax.Array:
        """See `Quantizer.rounding`; a level, since other bits of x would draw otherwise."""
        x_NB = to_blocks(x, self.block)
        return from_blocks(jnp.broadcast_to(_norm(x_NB) / self._levels, x_NB.shape), x.shape)

    @property
    def _levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1


def _norm(x_NB: jax.Array) -> jax.Array:
    largest_N1 = jnp.max(jnp.abs(x_NB), axis=1, keepdims=True)
    share_NB = x_NB / jnp.where(largest_N1 > 0, largest_N1, 1.0)  # whose squares stay in range
    return largest_N1 * jnp.sqrt(jnp.sum(share_NB**2, axis=1, keepdims=True))


def _key(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.random.key(jnp.sum(bits, dtype=jnp.uint32), impl="threefry2x32")
