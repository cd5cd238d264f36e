"""A parameter as a few DCT coefficients of each block: what peers send of their momentum."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.optim import dct
from pipeline.optim.optimizer import KeyPath, Tree, expect, group_of


class Coefficients(NamedTuple):
    """What a peer sends of one parameter; N blocks, K coefficients of each.

    Attributes:
      index_NK: Positions within the block, ascending; uint8, uint16 or uint32 by the block's area.
      value_NK: Coefficients, or bool "is negative" with `quantize_1bit`.
    """

    index_NK: jax.Array
    value_NK: jax.Array


@dataclass(frozen=True)
class Compressor:
    """Pure functions of one parameter, named by its path: `layout`, `encode`, `select`, `decode`.

    The DCT is linear, so a momentum is stored as its coefficients: decay and gradient add up there,
    and removing what was sent is setting zeros, exactly.

    A group is a top-level name of the params, such as "embed".

    Attributes:
      topk: Coefficients sent of each block; all of a smaller block.
      chunk: The longest side of a block; the largest divisor at most this is taken.
      quantize_1bit: Whether to send signs instead of values.
      value_dtype: What values are rounded to before they are sent; Psyche's is bfloat16.
      stacked: Groups whose leaves carry a leading layer axis.
      topk_of: A group's own topk.
      untransformed: Groups whose elements are sent themselves, not the coefficients of their DCT.
    """

    topk: int
    chunk: int
    quantize_1bit: bool
    value_dtype: jax.typing.DTypeLike = jnp.bfloat16
    stacked: tuple[str, ...] = ()
    topk_of: Mapping[str, int] = field(default_factory=dict)
    untransformed: Collection[str] = ()

    def __post_init__(self) -> None:
        counts = {f"topk_of[{group!r}]": topk for group, topk in self.topk_of.items()}
        for name, count in ({"topk": self.topk, "chunk": self.chunk} | counts).items():
            expect(name, count, lambda x: x >= 1, "an integer from 1")

    def layout(self, path: KeyPath, leaf: jax.Array) -> dct.Layout:
        """Return how a parameter is cut into blocks.

        Raises:
          ValueError: It has no elements.
        """
        if not leaf.size:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"params{name} has the shape {leaf.shape}, expected elements in it")
        return dct.layout(leaf.shape, self.chunk, stacked=group_of(path) in self.stacked)

    def encode(self, path: KeyPath, x: jax.Array) -> jax.Array:
        """Return the coefficients of x, in its shape."""
        if group_of(path) in self.untransformed:
            return x
        return dct.encode(x, self.layout(path, x))

    def decode(self, path: KeyPath, coefficients: jax.Array) -> jax.Array:
        """Return the x that has these coefficients."""
        if group_of(path) in self.untransformed:
            return coefficients
        return dct.decode(coefficients, self.layout(path, coefficients))

    def select(self, path: KeyPath, coefficients: jax.Array) -> Coefficients:
        """Return what is sent: the largest coefficients of each block."""
        blocks = self.layout(path, coefficients)
        index_NK, value_NK = dct.top_k(coefficients, blocks, self._topk(path))
        index_NK = index_NK.astype(dct.index_dtype(blocks.area))
        if self.quantize_1bit:  # Psyche's sign bit: -0.0 is negative, 0.0 is not
            return Coefficients(index_NK, jnp.signbit(value_NK))
        return Coefficients(index_NK, value_NK.astype(self.value_dtype))

    def mean(
        self, path: KeyPath, like: jax.Array, messages: Coefficients, present: jax.Array
    ) -> jax.Array:
        """Return each coefficient's mean over the present peers that sent it, in `like`'s shape."""
        index_PNK, value_PNK = messages
        if self.quantize_1bit:
            value_PNK = jnp.where(value_PNK, -1.0, 1.0)
        return dct.mean_of_senders(index_PNK, value_PNK, present, self.layout(path, like))

    def remove(
        self, path: KeyPath, coefficients: jax.Array, index_NK: jax.Array, share: float
    ) -> jax.Array:
        """Return what is left after these positions were sent: less by `share`, 1 leaves zeros."""
        return dct.remove(coefficients, self.layout(path, coefficients), index_NK, share)

    def first_positions(self, path: KeyPath, leaf: jax.Array) -> jax.Array:
        """Return the first positions of each block, index_NK: of the shape of what is sent."""
        blocks = self.layout(path, leaf)
        kept = min(self._topk(path), blocks.area)
        positions_K = jnp.arange(kept, dtype=dct.index_dtype(blocks.area))
        return jnp.broadcast_to(positions_K, (blocks.blocks, kept))

    def distance(self, path: KeyPath, coefficients: jax.Array, sent: Coefficients) -> jax.Array:
        """Return how far a message is from what would be selected of these coefficients.

        The largest of: how far below the block's k-th magnitude a sent position lies, or a value of
        the other sign is off, as a share of that magnitude; and how far off a value is, as a share
        of itself: bfloat16 rounds it by up to 1/256, whatever the k-th is.
        """
        cut = self.layout(path, coefficients)
        index_NK, value_NK = sent
        best_NK = jnp.abs(dct.top_k(coefficients, cut, index_NK.shape[1])[1])
        kth_N1 = jnp.min(best_NK, axis=-1, keepdims=True)
        mine_NK = dct.take(coefficients, cut, index_NK)
        below_NK = kth_N1 - jnp.abs(mine_NK)
        # a block that is all but zero holds rounding only: its positions say nothing
        floor = 1e-6 * jnp.max(jnp.abs(coefficients)) + np.finfo(np.float32).tiny
        size_N1 = jnp.maximum(kth_N1, floor)
        if value_NK.dtype == bool:
            flipped_NK = jnp.where(value_NK == jnp.signbit(mine_NK), 0.0, jnp.abs(mine_NK))
            off_NK = flipped_NK / size_N1
        else:
            off_NK = jnp.abs(value_NK - mine_NK) / jnp.maximum(size_N1, jnp.abs(mine_NK))
        return jnp.max(jnp.maximum(below_NK / size_N1, off_NK))

    def areas(self, params: Tree) -> Tree:
        """Return how many positions a block of each parameter has."""
        return jax.tree.map_with_path(lambda path, leaf: self.layout(path, leaf).area, params)

    def _topk(self, path: KeyPath) -> int:
        return self.topk_of.get(group_of(path) or "", self.topk)
