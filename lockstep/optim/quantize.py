"""Quantizers: arrays rounded to fewer bits, and an optimizer whose messages are rounded so.

Shapes: N blocks of B elements each, the last one padded; M elements of an array.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.optim import expect
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree


class Quantizer(ABC):
    """Rounds an array to fewer bits; pure functions, whose shapes follow from the array's."""

    @abstractmethod
    def encode(self, x: jax.Array) -> Tree:
        """Return a float32 array as quantized: arrays of float32, bfloat16, float16 or uint8."""

    @abstractmethod
    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        """Return the float32 array of this shape that a quantizer's code stands for."""


class Code(NamedTuple):
    """A quantized array: numbers of few bits, which multiply the scale of their block.

    Attributes:
      scale: float32, one or more for each block.
      packed: uint8, the numbers in C order of the array, the first in the lowest bits.
    """

    scale: jax.Array
    packed: jax.Array


def to_blocks(x: jax.Array, block: int) -> jax.Array:
    """Return an array's elements in a quantizer's blocks, [N, B], the last one padded with zeros.

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
    """Return the array of this shape whose quantized blocks these are."""
    return x_NB.ravel()[: math.prod(shape)].reshape(shape)


def counts(size: int, block: int) -> np.ndarray:
    """Return the number of an array's elements in each of a quantizer's blocks: [N, 1]."""
    width = _width(size, block)
    return np.minimum(width, size - width * np.arange(-(-size // width)))[:, None]


def pack(number_NB: jax.Array, size: int, bits: int) -> jax.Array:
    """Return the first `size` quantized numbers, of 1, 2, 4 or 8 bits each, in bytes: uint8."""
    per_byte = 8 // bits
    number_M = number_NB.ravel()[:size].astype(jnp.uint8)
    number_M = jnp.pad(number_M, (0, -size % per_byte))
    shifted = number_M.reshape(-1, per_byte) << (bits * np.arange(per_byte, dtype=np.uint8))
    return jnp.sum(shifted, axis=1, dtype=jnp.uint8)


def unpack(packed: jax.Array, size: int, bits: int, block: int) -> jax.Array:
    """Return the quantized numbers that `pack` packed, in blocks: uint8 [N, B]."""
    shifts = bits * np.arange(8 // bits, dtype=np.uint8)
    number_M = (packed[:, None] >> shifts & np.uint8(2**bits - 1)).ravel()[:size]
    return to_blocks(number_M, block)


@dataclass(frozen=True)
class Half(Quantizer):
    """A quantizer to the nearest number of a 16-bit type, at most its largest: 2 bytes per element.

    Attributes:
      dtype: bfloat16, with the range of float32 and 8 bits of precision; or float16, with 11 bits,
        up to 65,504.
    """

    dtype: jax.typing.DTypeLike

    def __post_init__(self) -> None:
        expect.dtype("dtype", self.dtype, jnp.bfloat16, jnp.float16)

    def encode(self, x: jax.Array) -> Tree:
        most = float(jnp.finfo(self.dtype).max)  # type: ignore[no-untyped-call]
        return jnp.clip(x, -most, most).astype(self.dtype)

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        half: jax.Array = code
        return half.astype(jnp.float32).reshape(shape)


@dataclass(frozen=True)
class _InBlocks(Quantizer):
    """A quantizer of elements to few bits, which share a scale, levels or a norm in their block."""

    bits: int
    block: int
    choices: ClassVar[tuple[int, int]]

    def __post_init__(self) -> None:
        fewer, more = self.choices
        expect.integer("bits", self.bits, lambda x: x in self.choices, f"{fewer} or {more}")
        expect.counts(block=self.block)

    @property
    def _most(self) -> int:
        """The largest quantized number beside a sign."""
        return int(2 ** (self.bits - 1)) - 1


class Integers(_InBlocks):
    """A quantizer to the nearest integer times the scale of its block.

        scale = max |x| / (2^(bits - 1) - 1)        over a block
        q     = round(x / scale)

    bits / 8 bytes per element and 4 for each block. Sent is q + 2^(bits - 1).

    Attributes:
      bits: Bits of an integer, 8 or 4.
      block: Elements that share a scale.
    """

    choices = (4, 8)

    def encode(self, x: jax.Array) -> Tree:
        x_NB = to_blocks(x, self.block)
        scale_N1 = jnp.max(jnp.abs(x_NB), axis=1, keepdims=True) / self._most
        q_NB = jnp.round(x_NB / jnp.where(scale_N1 > 0, scale_N1, 1.0))
        # A scale so small that it is itself rounded could give one more than the most.
        q_NB = jnp.clip(q_NB, -self._most, self._most)
        return Code(scale_N1, pack(q_NB + (self._most + 1), x.size, self.bits))

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        number_NB = unpack(code.packed, math.prod(shape), self.bits, self.block)
        q_NB = number_NB.astype(jnp.float32) - (self._most + 1)
        return from_blocks(q_NB * code.scale, shape)


class Levels(_InBlocks):
    """A quantizer to a sign times a level, which is a mean magnitude of elements of the block.

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

    choices = (1, 2)

    def encode(self, x: jax.Array) -> Tree:
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
        number_NB = unpack(code.packed, math.prod(shape), self.bits, self.block)
        magnitude_NB = level_of(code.scale, number_NB >> 1)
        return from_blocks(jnp.where(number_NB & 1, -magnitude_NB, magnitude_NB), shape)


def two_levels(
    magnitude_NB: jax.Array, real_NB: np.ndarray | bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return a quantizer's two mean magnitudes of a block, small and large, and which are large.

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
    """Return the quantizer's level of each element by its number: [N, B]."""
    return jnp.take_along_axis(level_NL, number_NB.astype(jnp.int32), axis=1)


class QSGD(_InBlocks):
    """A quantizer that draws a neighbouring level, so that the expected value is x.

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

    choices = (4, 8)

    def encode(self, x: jax.Array) -> Tree:
        x_NB = to_blocks(x, self.block)
        norm_N1 = _norm(x_NB)
        share_NB = jnp.abs(x_NB) / jnp.where(norm_N1 > 0, norm_N1, 1.0)
        level_NB = jnp.floor(self._most * share_NB + jax.random.uniform(_key(x), x_NB.shape))
        level_NB = jnp.minimum(level_NB, self._most).astype(jnp.uint8)
        sign_NB = jnp.signbit(x_NB).astype(jnp.uint8)
        return Code(norm_N1, pack(level_NB | sign_NB << (self.bits - 1), x.size, self.bits))

    def decode(self, code: Tree, shape: tuple[int, ...]) -> jax.Array:
        number_NB = unpack(code.packed, math.prod(shape), self.bits, self.block)
        sign_NB = number_NB >> (self.bits - 1)
        level_NB = number_NB & jnp.uint8(self._most)
        q_NB = jnp.where(sign_NB, -1.0, 1.0) * level_NB * (code.scale / self._most)
        return from_blocks(q_NB, shape)


def _norm(x_NB: jax.Array) -> jax.Array:
    largest_N1 = jnp.max(jnp.abs(x_NB), axis=1, keepdims=True)
    share_NB = x_NB / jnp.where(largest_N1 > 0, largest_N1, 1.0)  # whose squares stay in range
    return largest_N1 * jnp.sqrt(jnp.sum(share_NB**2, axis=1, keepdims=True))


def _key(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    # The generator is named, since JAX's default is a setting: a replay has to draw the same.
    return jax.random.key(jnp.sum(bits, dtype=jnp.uint32), impl="threefry2x32")


class QuantizedState(NamedTuple):
    """A peer's own state in the optimizer `quantized`.

    Attributes:
      own: `own` of the optimizer.
      error: Sum of what rounding left out, in the shapes of the params; empty without feedback.
    """

    own: Tree
    error: Tree


def quantized(optimizer: Optimizer, quantizer: Quantizer, error_feedback: float = 0.0) -> Optimizer:
    """Return the optimizer with messages that the quantizer has rounded.

    With x the message that the optimizer would send:

        x  <- x + error_feedback * e
        q   = encode(x), which is sent
        e  <- x - decode(q)

    All peers, the sender too, receive what the codes stand for.

    With an error_feedback of 0 there is no e. The optimizer sends float32 arrays in the shapes of
    the params, which depend on its own state alone, as those of `dense` do.

    References:
      Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel
        Distributed Training of Speech DNNs, Interspeech 2014
    """
    expect.kind(Optimizer, optimizer=optimizer)
    expect.kind(Quantizer, quantizer=quantizer)
    expect.share("error_feedback", error_feedback)

    def decode(message: Tree, params: Tree) -> Tree:
        return jax.tree.map(lambda x, code: quantizer.decode(code, x.shape), params, message)

    def with_error(state: Tree, error: Callable[[], Tree]) -> QuantizedState:
        return QuantizedState(state, error() if error_feedback else optax.EmptyState())

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        zero = partial(jnp.zeros_like, dtype=jnp.float32)
        return with_error(own, lambda: jax.tree.map(zero, params)), shared

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return own._replace(own=optimizer.accumulate(grads, own.own, params, step))

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        x, state = optimizer.send(own.own, params, optax.EmptyState(), step)
        if error_feedback:
            x = jax.tree.map(lambda x, e: x + error_feedback * e, x, own.error)
        message = jax.tree.map(quantizer.encode, x)
        left_out = partial(jax.tree.map, jnp.subtract, x, decode(message, params))
        return message, with_error(state, left_out)

    def receive(
        messages: Tree, peers: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        decoded = jax.vmap(partial(decode, params=params), axis_size=len(peers.weight))(messages)
        return optimizer.receive(decoded, peers, params, shared, step)

    def areas(params: Tree) -> Tree:
        codes = jax.eval_shape(lambda params: jax.tree.map(quantizer.encode, params), params)
        return jax.tree.map(lambda _: 0, codes)

    return optimizer._replace(
        init=init, accumulate=accumulate, send=send, receive=receive, areas=areas,
        merge=None,
    )  # fmt: skip
