"""Chunked discrete cosine transform, top-k and their inverses: pure functions of arrays.

Shapes: N blocks of an array, A = area of a block (h * w, or w of a vector), K kept of a block.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Layout(NamedTuple):
    """How an array is cut into blocks: `rows` x `columns` of them, of `height` x `width` each."""

    shape: tuple[int, ...]
    lead: int  # how many matrices (or vectors) lie side by side before the last axes
    rows: int
    height: int
    columns: int
    width: int

    @property
    def blocks(self) -> int:
        return self.lead * self.rows * self.columns

    @property
    def area(self) -> int:
        return self.height * self.width


def divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` up to `limit` 64: 64 of 4096, 29 of 50257, 1 of a prime."""
    return next(n for n in range(min(size, limit), 0, -1) if size % n == 0)


def layout(shape: tuple[int, ...], chunk: int, *, stacked: bool = False) -> Layout:
    """How an array is cut: the last two axes by at most `chunk` each; a vector's one axis.

    Args:
      shape: of the array.
      chunk: the longest side of a block.
      stacked: whether the first axis counts layers, so that a [layer, D] array is vectors.
    """
    axes = shape[1:] if stacked else shape
    height_all, width_all = axes[-2:] if len(axes) >= 2 else (1, *(axes or (1,)))
    height, width = divisor(height_all, chunk), divisor(width_all, chunk)
    lead = math.prod(shape) // (height_all * width_all)
    return Layout(shape, lead, height_all // height, height, width_all // width, width)


@lru_cache
def basis(n: int) -> np.ndarray:
    """The orthonormal DCT-II basis, float32 [n, n]; row k is the k-th cosine.

    basis[k, i] = sqrt((2 - [k = 0]) / n) * cos(pi * (2 i + 1) * k / (2 n))

    Its transpose is its inverse. Computed in float64, so that no platform's cosine shows.
    """
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    scale = np.sqrt(np.where(k == 0, 1.0, 2.0) / n)
    return (scale * np.cos(np.pi * (2 * i + 1) * k / (2 * n))).astype(np.float32)


def encode(x: jax.Array, cut: Layout) -> jax.Array:
    """The DCT-II of each block: coefficients [N, A], row-major within a block."""
    tiles = x.reshape(cut.lead, cut.rows, cut.height, cut.columns, cut.width)
    tiles = tiles @ basis(cut.width).T
    tiles = tiles.transpose(0, 1, 3, 4, 2)  # contracted axis last: one plain matrix product
    tiles = tiles @ basis(cut.height).T
    return tiles.swapaxes(-1, -2).reshape(cut.blocks, cut.area)


def decode(coefficients_NA: jax.Array, cut: Layout) -> jax.Array:
    """The inverse of `encode`: the array whose blocks have these coefficients."""
    tiles = coefficients_NA.reshape(cut.lead, cut.rows, cut.columns, cut.height, cut.width)
    tiles = tiles @ basis(cut.width)
    tiles = tiles.swapaxes(-1, -2) @ basis(cut.height)
    return tiles.transpose(0, 1, 4, 2, 3).reshape(cut.shape)


def index_dtype(area: int) -> np.dtype:
    """The narrowest unsigned integer that names a place in a block, as on Psyche's wire."""
    return np.dtype(np.uint8 if area <= 2**8 else np.uint16 if area <= 2**16 else np.uint32)


def top_k(coefficients_NA: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k coefficients of largest magnitude in each block, in ascending order of their place.

    Of equal magnitudes the lowest place wins, always: a witness must find the same ones. The order
    by place is the canonical one that the wire and the commitments use.

    Returns:
      index_NK int32 and value_NK; K = min(k, A).
    """
    k = min(k, coefficients_NA.shape[-1])
    _, index_NK = jax.lax.top_k(jnp.abs(coefficients_NA), k)
    index_NK = jnp.sort(index_NK, axis=-1)
    return index_NK, jnp.take_along_axis(coefficients_NA, index_NK, axis=-1)


def remove(coefficients_NA: jax.Array, index_NK: jax.Array) -> jax.Array:
    """Zeros at the named places: what is left after sending them."""
    rows_N1 = jnp.arange(coefficients_NA.shape[0])[:, None]
    return coefficients_NA.at[rows_N1, index_NK].set(0.0, unique_indices=True)


def mean_of_senders(
    index_PNK: jax.Array, value_PNK: jax.Array, present_P: jax.Array, area: int
) -> jax.Array:
    """Each coefficient's mean over the peers that sent it, zero where none did: [N, A].

    mean[n, a] = sum_p value / |{p present : a in index[p, n]}|

    Peers are added one after another, and none names a place twice: the order of sums is fixed.
    """
    blocks = index_PNK.shape[1]
    rows_N1 = jnp.arange(blocks)[:, None]

    def add(sums: tuple[jax.Array, jax.Array], peer: tuple[jax.Array, ...]) -> tuple:
        total_NA, senders_NA = sums
        index_NK, value_NK, present = peer
        place = rows_N1, index_NK.astype(jnp.int32)
        # `where`, not a product: an absent peer's row may hold anything, NaN included
        value_NK = jnp.where(present, value_NK, 0.0)
        total_NA = total_NA.at[place].add(value_NK, unique_indices=True)
        senders_NA = senders_NA.at[place].add(present.astype(jnp.float32), unique_indices=True)
        return (total_NA, senders_NA), None

    zeros_NA = jnp.zeros((blocks, area), jnp.float32)
    sums, _ = jax.lax.scan(add, (zeros_NA, zeros_NA), (index_PNK, value_PNK, present_P))
    total_NA, senders_NA = sums
    return total_NA / jnp.maximum(senders_NA, 1.0)
