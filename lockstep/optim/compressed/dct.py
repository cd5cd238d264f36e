"""Chunked discrete cosine transform, top-k and their inverses: pure functions of arrays.

A block's coefficient (k, l) is stored at the place of its element (k, l), in an array of the same
shape. So no transform moves memory, and only the few chosen coefficients are named by block and
position.

Shapes: N blocks of an array, A = area of a block (h * w, or w of a vector), K kept of a block.
"""

import math
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.aggregation import FEW, AggregateFn, mean

GROUP = 8  # top_k first compares the largest of this many neighbours; 16 to 64 were no faster


class Layout(NamedTuple):
    """How the DCT cuts an array into blocks: `rows` x `columns`, of `height` x `width` each."""

    shape: tuple[int, ...]
    lead: int  # how many matrices (or vectors) lie side by side before the last axes
    rows: int
    height: int
    columns: int
    width: int

    @property
    def blocks(self) -> int:
        """Number of DCT blocks of an array."""
        return self.lead * self.rows * self.columns

    @property
    def area(self) -> int:
        """Positions of a DCT block."""
        return self.height * self.width


def divisor(size: int, limit: int) -> int:
    """Return a DCT block's side, the largest divisor of `size` up to `limit`; 29 of 50257."""
    return next(n for n in range(min(size, limit), 0, -1) if size % n == 0)


def layout(shape: tuple[int, ...], chunk: int, *, stacked: bool = False) -> Layout:
    """Return how the DCT cuts an array: the last two axes by `chunk` at most; a vector's one axis.

    Args:
      shape: Shape of the array.
      chunk: The longest side of a block.
      stacked: Whether the first axis counts layers, so that a [layer, D] array is vectors.
    """
    axes = shape[1:] if stacked else shape
    height_all, width_all = axes[-2:] if len(axes) >= 2 else (1, *(axes or (1,)))
    height, width = divisor(height_all, chunk), divisor(width_all, chunk)
    lead = math.prod(shape) // (height_all * width_all)
    return Layout(shape, lead, height_all // height, height, width_all // width, width)


@lru_cache
def basis(n: int) -> np.ndarray:
    """Return the orthonormal DCT-II basis, float32 [n, n]; row k is the k-th cosine.

    basis[k, i] = sqrt((2 - [k = 0]) / n) * cos(pi * (2 i + 1) * k / (2 n))

    Its transpose is its inverse. Computed in float64, so that no platform's cosine shows; and 0
    where the cosine is, not a rounded pi's 1e-16, which can be all that decides on a sign.
    """
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    scale = np.sqrt(np.where(k == 0, 1.0, 2.0) / n)
    turns = (2 * i + 1) * k  # in units of pi / (2 n)
    cosine = np.where(turns % (2 * n) == n, 0.0, np.cos(np.pi * turns / (2 * n)))
    return (scale * cosine).astype(np.float32)


def encode(x: jax.Array, cut: Layout) -> jax.Array:
    """Return the DCT-II of each block in its place: same shape."""
    x = x.astype(jnp.float32)
    if cut.width > 1:
        x = x.reshape(-1, cut.width) @ basis(cut.width).T
    if cut.height > 1:
        x = _each_band(basis(cut.height), _bands(x, cut))
    return x.reshape(cut.shape)


def _each_band(left: np.ndarray, bands: jax.Array) -> jax.Array:
    """Return left @ band of the DCT for each band of blocks; `matmul` would transpose bands."""
    lefts = jnp.broadcast_to(left, (len(bands), *left.shape))
    return jax.lax.dot_general(lefts, bands, (((2,), (1,)), ((0,), (0,))))


def _bands(x: jax.Array, cut: Layout) -> jax.Array:
    """Return an array as its bands: DCT blocks side by side."""
    return x.reshape(cut.lead * cut.rows, cut.height, cut.columns * cut.width)


def decode(coefficients: jax.Array, cut: Layout) -> jax.Array:
    """Return the inverse DCT: the array whose blocks have these coefficients.

    Along the width, cosines of even k are the same from both ends, and those of odd k opposite:

        x[i] = even[i] + odd[i],  x[n - 1 - i] = even[i] - odd[i]        for i < n / 2

    That halves a product, which an exact merge (`programs.same_bits`) takes in float64. Along the
    height it would not pay: what reads the result would compute its halves again.
    """
    x = coefficients
    if cut.width > 1:
        rows, inverse = x.reshape(-1, cut.width), basis(cut.width)[:, : -(-cut.width // 2)]
        even, odd = rows[:, 0::2] @ inverse[0::2], rows[:, 1::2] @ inverse[1::2]
        second = (even - odd)[:, : cut.width // 2][:, ::-1]
        x = jnp.concatenate([even + odd, second], axis=1)
    if cut.height > 1:
        x = _each_band(basis(cut.height).T, _bands(x, cut))
    return x.reshape(cut.shape)


def index_dtype(area: int) -> np.dtype:
    """Return the narrowest unsigned integer that names a DCT block's positions, as Psyche does."""
    return np.dtype(np.uint8 if area <= 2**8 else np.uint16 if area <= 2**16 else np.uint32)


def top_k(coefficients: jax.Array, cut: Layout, k: int) -> tuple[jax.Array, jax.Array]:
    """Return each DCT block's k coefficients of largest magnitude, in ascending order of position.

    Of equal magnitudes the lowest position wins, always: a replay must choose the same ones. The
    order by position is the canonical one that the wire and the commitments use.

    It narrows a block down in steps: to the k rows with the largest maxima, if k is few of them; in
    these, to the k groups of neighbours with the largest maxima; in these, to the k largest. None
    is missed: a row or group that is passed over has k before it whose maxima come before each of
    its own elements, ties included, since they stand in the order of positions.

    Returns:
      index_NK int32 and value_NK; K = min(k, A).
    """
    group = math.gcd(cut.width, GROUP)
    across = cut.width // group
    # magnitudes of floats are ordered as their bits are, and integers are compared much faster
    bits = jax.lax.bitcast_convert_type(coefficients, jnp.uint32) & 0x7FFFFFFF
    groups = bits.reshape(-1, cut.height, cut.columns, across, group)
    largest_NHG = jnp.max(groups, axis=-1).swapaxes(1, 2).reshape(cut.blocks, cut.height, across)
    largest_NG = largest_NHG.reshape(cut.blocks, -1)
    if 2 * k < cut.height:  # else hardly any row would be passed over
        group_NG = _members(_largest(jnp.max(largest_NHG, axis=-1), k), across)
        largest_NG = jnp.take_along_axis(largest_NG, group_NG, axis=-1)
        chosen_NC = jnp.take_along_axis(group_NG, _largest(largest_NG, k), axis=-1)
    else:
        chosen_NC = _largest(largest_NG, k)

    index_NF = _members(chosen_NC, group)
    value_NF = take(coefficients, cut, index_NF)
    finalist_NK = _largest(jax.lax.bitcast_convert_type(value_NF, jnp.uint32) & 0x7FFFFFFF, k)
    index_NK = jnp.take_along_axis(index_NF, finalist_NK, axis=-1)
    return index_NK, jnp.take_along_axis(value_NF, finalist_NK, axis=-1)


def _largest(bits_NA: jax.Array, k: int) -> jax.Array:
    """Return where in each row of DCT blocks the k largest floats of these bits stand, in order."""
    floats_NA = jax.lax.bitcast_convert_type(bits_NA, jnp.float32)  # what XLA's top-k is made for
    _, index_NK = jax.lax.top_k(floats_NA, min(k, bits_NA.shape[-1]))
    return jnp.sort(index_NK, axis=-1)


def _members(group_NC: jax.Array, size: int) -> jax.Array:
    """Return the positions in groups of `size`, for the top k, group by group: [N, C * size]."""
    return (group_NC[:, :, None] * size + jnp.arange(size)).reshape(len(group_NC), -1)


def take(coefficients: jax.Array, cut: Layout, index_NK: jax.Array) -> jax.Array:
    """Return the DCT coefficients at the named positions of each block."""
    return coefficients.reshape(-1)[_address(cut, index_NK)]


def remove(coefficients: jax.Array, cut: Layout, index_NK: jax.Array) -> jax.Array:
    """Return DCT coefficients after sending: zeros at the named positions."""
    target = coefficients.reshape(-1).at[_address(cut, index_NK)]
    return target.set(0.0, unique_indices=True, mode="promise_in_bounds").reshape(cut.shape)


def put(index_NK: jax.Array, value_NK: jax.Array, cut: Layout) -> jax.Array:
    """Return the array with these DCT coefficients at each block's named positions, else zeros."""
    target = jnp.zeros(math.prod(cut.shape), value_NK.dtype).at[_address(cut, index_NK)]
    flat = target.set(value_NK, unique_indices=True, mode="promise_in_bounds")
    return flat.reshape(cut.shape)


def aggregate_sent(
    index_PNK: jax.Array,
    value_PNK: jax.Array,
    present: jax.Array,
    cut: Layout,
    aggregate: AggregateFn,
) -> jax.Array:
    """Return each DCT coefficient's aggregate over the peers that sent it, zero where none did.

    Peers are present as a whole, [P], or block by block, [P, N]. An aggregate other than `mean`
    takes memory for P arrays.
    """
    if aggregate is mean:
        return _mean_of_senders(index_PNK, value_PNK, present, cut)
    sent_PNK = jnp.broadcast_to(_as_values(present), index_PNK.shape)
    put_all = jax.vmap(partial(put, cut=cut))
    agreed: jax.Array = aggregate(put_all(index_PNK, value_PNK), put_all(index_PNK, sent_PNK))
    return agreed


def _mean_of_senders(
    index_PNK: jax.Array, value_PNK: jax.Array, present: jax.Array, cut: Layout
) -> jax.Array:
    """Return the mean of DCT coefficients over their senders, in memory of one array.

        mean[n, a] = sum_p value / |{p present : a in index[p, n]}|

    Peers are added one after another, and none names a position twice: the order of sums is fixed.
    """
    address_PNK = _address(cut, index_PNK)
    # `where`, not a product: an absent peer's row may hold anything, NaN included
    present = _as_values(present)
    value_PNK = FEW * jnp.where(present, value_PNK.astype(jnp.float32), 0.0)

    def add(total: jax.Array, peer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        address_NK, value_NK = peer
        target = total.at[address_NK]
        return target.add(value_NK, unique_indices=True, mode="promise_in_bounds"), None

    size = math.prod(cut.shape)
    zeros = jnp.zeros_like(value_PNK, shape=size)  # which vary among shard_map's devices as it does
    total, _ = jax.lax.scan(add, zeros, (address_PNK, value_PNK))
    target = jnp.zeros(size, jnp.uint16).at[address_PNK]
    senders = target.add(present.astype(jnp.uint16), mode="promise_in_bounds")
    # divided only where something was sent; senders of one coefficient write the same mean
    mean_PNK = total[address_PNK] / jnp.maximum(senders[address_PNK], 1) / FEW

    def write(total: jax.Array, peer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        address_NK, mean_NK = peer
        target = total.at[address_NK]
        return target.set(mean_NK, unique_indices=True, mode="promise_in_bounds"), None

    return jax.lax.scan(write, total, (address_PNK, mean_PNK))[0].reshape(cut.shape)


def _as_values(present: jax.Array) -> jax.Array:
    return present.reshape(*present.shape, *[1] * (3 - present.ndim))


def _address(cut: Layout, index_NK: jax.Array) -> jax.Array:
    """Return where a DCT block's named positions lie in the flat array; leading axes stay."""
    index_NK = index_NK.astype(jnp.int32)
    block_N1 = jnp.arange(cut.blocks, dtype=jnp.int32)[:, None]
    band, column = block_N1 // cut.columns, block_N1 % cut.columns
    row, offset = index_NK // cut.width, index_NK % cut.width
    return ((band * cut.height + row) * cut.columns + column) * cut.width + offset
