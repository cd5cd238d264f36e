"""Integers times a scale for each block."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from lockstep.optim.expect import expect_counts, expect_integer
from lockstep.optim.optimizer import Tree
from lockstep.optim.quantize.quantizer import Code, from_blocks, off_by, pack, to_blocks, unpack


@dataclass(frozen=True)
class Integers:
    """Rounds to the nearest integer times the scale of its block.

        scale = max |x| / (2^(bits - 1) - 1)        over a block
        q     = round(x / scale)

    bits / 8 bytes per element and 4 for each block. Sent is q + 2^(bits - 1).

    Attributes:
      bits: Bits of an integer, 8 or 4.
      block: Elements that share a scale.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        expect_integer("bits", self.bits, lambda x: x in (4, 8), "4 or 8")
        expect_counts(block=self.block)

    def encode(self, x: jax.Array) -> Tree:
        """See `Quantizer.encode`."""
        x_NB = to_blocks(x, self.block)
        scale_N1 = jnp.max(jnp.abs(x_NB), axis=1, keepdims=True) / self._most
        q_NB = jnp.round(x_NB / jnp.where(scale_N1 > 0, scale_N1, 1.0))
        # A scale so small that it is itself rounded could give one more than the most.
        q_NB = jnp.clip(q_NB, -self._most, self._most)
        return Code(scale_N1, pack(q_NB + self._zero, x.size, self.bits))

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        """See `Quantizer.decode`."""
        number_NB = unpack(code.packed, math.prod(shape), self.bits, self.block)
        return from_blocks((number_NB.astype(jnp.float32) - self._zero) * code.scale, shape)

    def rounding(self, x: jax.Array) -> jax.Array:
        """See `Quantizer.rounding`."""
        return off_by(self, x)

    @property
    def _zero(self) -> int:
        return int(2 ** (self.bits - 1))

    @property
    def _most(self) -> int:
        return self._zero - 1
