"""A parameter as a few DCT coefficients of each block: what peers send of their momentum."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from lockstep.optim import expect
from lockstep.optim.aggregation import AggregateFn
from lockstep.optim.compressed import dct
from lockstep.optim.optimizer import KeyPath, Tree, group_of


class Coefficients(NamedTuple):
    """What a compressor sends of one parameter; N blocks, K DCT coefficients of each.

    Attributes:
      index_NK: Positions within the block, ascending; uint8, uint16 or uint32 by the block's area.
      value_NK: Coefficients, or bool "is negative" with `quantize_1bit`.
    """

    index_NK: jax.Array
    value_NK: jax.Array


class SomeBlocks(NamedTuple):
    """What a compressor sends of one parameter if blocks of zeros are left out; or the block areas.

    Shapes never depend on values, so a block of zeros is sent like any other, and marked.

    Attributes:
      zero: A bit for each block, set if the block is all zero and does not count. float32 numbers,
        each of which holds `BITS` bits exactly.
      sent: `Coefficients` of all blocks.
    """

    zero: Tree
    sent: Tree


Selection: TypeAlias = Coefficients | SomeBlocks  # what a peer sends of one parameter
BITS = 24  # float32 holds integers of this many bits exactly


@dataclass(frozen=True)
class Compressor:
    """A compressor: functions of a parameter at its path: `layout`, `encode`, `select`, `decode`.

    The DCT is linear, so a momentum is stored as its coefficients. Decay and gradients add up
    there, and removing what was sent sets zeros: exactly, and without an inverse transform.

    Attributes:
      topk: Coefficients sent of each block; all of a smaller block.
      chunk: The longest side of a block; the largest divisor at most this is taken.
      quantize_1bit: Whether to send signs instead of values.
      value_dtype: Dtype that values are rounded to before they are sent; bfloat16 in Psyche. On
        the wire, as in `simulate`, it must be that; `as_transform` takes float16 and float32 too.
      stacked: Top-level groups of the params whose leaves carry a leading layer axis.
      skip_zero_blocks: Whether blocks of zeros count as not sent. Else the sign of such a block's
        first zeros is +, and it steps, as in Psyche.
    """

    topk: int
    chunk: int
    quantize_1bit: bool
    value_dtype: jax.typing.DTypeLike = jnp.bfloat16
    stacked: tuple[str, ...] = ()
    skip_zero_blocks: bool = False

    def __post_init__(self) -> None:
        expect.counts(topk=self.topk, chunk=self.chunk)
        expect.flags(quantize_1bit=self.quantize_1bit, skip_zero_blocks=self.skip_zero_blocks)
        expect.dtype("value_dtype", self.value_dtype, jnp.float32, jnp.bfloat16, jnp.float16)
        expect.groups(stacked=self.stacked)

    def layout(self, path: KeyPath, leaf: jax.Array) -> dct.Layout:
        """Return how the compressor cuts a parameter into blocks.

        Raises:
          ValueError: It has no elements.
        """
        if not leaf.size:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"params{name} has the shape {leaf.shape}, expected elements in it")
        return dct.layout(leaf.shape, self.chunk, stacked=group_of(path) in self.stacked)

    def encode(self, path: KeyPath, x: jax.Array) -> jax.Array:
        """Return x as the compressor's coefficients, in its shape."""
        return dct.encode(x, self.layout(path, x))

    def decode(self, path: KeyPath, coefficients: jax.Array) -> jax.Array:
        """Return the x that has these coefficients, the inverse of the compressor's `encode`."""
        return dct.decode(coefficients, self.layout(path, coefficients))

    def select(self, path: KeyPath, coefficients: jax.Array) -> Selection:
        """Return what the compressor sends: the largest coefficients of each block."""
        layout = self.layout(path, coefficients)
        index_NK, value_NK = dct.top_k(coefficients, layout, self.topk)
        index_NK = index_NK.astype(dct.index_dtype(layout.area))
        if self.quantize_1bit:  # Psyche's sign bit: -0.0 is negative, 0.0 is not
            sent = Coefficients(index_NK, jnp.signbit(value_NK))
        else:
            sent = Coefficients(index_NK, value_NK.astype(self.value_dtype))
        if not self.skip_zero_blocks:
            return sent
        return SomeBlocks(_packed(jnp.all(value_NK == 0, axis=-1)), sent)

    def aggregate(
        self,
        path: KeyPath,
        like: jax.Array,
        messages: Selection,
        present: jax.Array,
        aggregate: AggregateFn,
    ) -> jax.Array:
        """Return the aggregate of sent coefficients over present senders, shaped like `like`."""
        index_PNK, value_PNK = coefficients_of(messages)
        if isinstance(messages, SomeBlocks):
            blocks = index_PNK.shape[1]
            zero_PN = jax.vmap(lambda bits: _unpacked(bits, blocks))(messages.zero)
            present = present[:, None] & ~zero_PN
        if self.quantize_1bit:
            value_PNK = jnp.where(value_PNK, -1.0, 1.0)
        return dct.aggregate_sent(index_PNK, value_PNK, present, self.layout(path, like), aggregate)

    def remove(self, path: KeyPath, coefficients: jax.Array, index_NK: jax.Array) -> jax.Array:
        """Return the compressor's coefficients after these positions were sent: zeros there."""
        return dct.remove(coefficients, self.layout(path, coefficients), index_NK)

    def first_positions(self, path: KeyPath, leaf: jax.Array) -> jax.Array:
        """Return the first positions of a compressor's blocks, index_NK: as what is sent."""
        layout = self.layout(path, leaf)
        count = min(self.topk, layout.area)
        positions_K = jnp.arange(count, dtype=dct.index_dtype(layout.area))
        return jnp.broadcast_to(positions_K, (layout.blocks, count))

    def areas(self, params: Tree) -> Tree:
        """Return how many positions each compressed parameter's block has, as in a message."""

        def block_area(path: KeyPath, leaf: jax.Array) -> Tree:
            area = self.layout(path, leaf).area
            return SomeBlocks(0, area) if self.skip_zero_blocks else area

        return jax.tree.map_with_path(block_area, params)


def coefficients_of(message: Selection) -> Coefficients:
    """Return the coefficients in what a compressor sends of one parameter."""
    sent: Coefficients = message.sent if isinstance(message, SomeBlocks) else message
    return sent


def _packed(flags_N: jax.Array) -> jax.Array:
    """Return flags of a compressor's blocks as integers of `BITS` bits, in float32."""
    flags = jnp.pad(flags_N, (0, -len(flags_N) % BITS)).reshape(-1, BITS)
    return jnp.sum(flags << jnp.arange(BITS), axis=1).astype(jnp.float32)


def _unpacked(packed: jax.Array, count: int) -> jax.Array:
    """Return `count` flags of blocks that `_packed` packed; others give some flags, no error.

    A stranger's message may hold anything, and a jitted program cannot refuse it.
    """
    bits = jnp.clip(packed, 0, 2.0**BITS - 1).astype(jnp.int32)[:, None] >> jnp.arange(BITS)
    return (bits & 1).astype(bool).reshape(-1)[:count]
