"""Rice-coded gaps: sorted indices of blocks in nearly as few bits as possible.

    gap  = index - previous index - 1, within a block; for its first index, the index itself
    low  = gap mod 2^r    r bits
    high = gap div 2^r    as many zero bits, and a one

For k indices drawn uniformly from A the limit is log2(C(A, k)) / k bits each: 10.1 for 8 of 4,096,
where this takes 10.3. Real indices cluster and take fewer. Low bits lie in planes and all highs in
one stream, so that NumPy codes a million indices in a few passes, without a loop.

Shapes: N blocks, K indices of each, M gaps of a whole message, parameter after parameter.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.wire.reader import WireError


def gaps(index_NK: np.ndarray) -> np.ndarray:
    """Return the gaps before indices that ascend strictly within a block: uint32 [N * K]."""
    k, flat = index_NK.shape[1], index_NK.ravel().astype(np.uint32)
    gap_M = flat.copy()
    gap_M[1:] -= flat[:-1] + np.uint32(1)  # across blocks it wraps, and is replaced
    gap_M[::k] = flat[::k]
    return gap_M


def indices(gap: np.ndarray, k: int) -> np.ndarray:
    """Return the indices that int64 gaps represent: [N, K]; the inverse of `gaps`."""
    return np.cumsum(gap.reshape(-1, k) + 1, axis=1) - 1


def parameters(gap_M: np.ndarray, counts: list[int]) -> np.ndarray:
    """Return, for each run of `counts` gaps, the smallest r with the fewest bits.

    bits(r) = n (r + 1) + sum(gap div 2^r) is convex in r: take the first that the next does not
    beat.
    """
    starts, n = np.cumsum([0, *counts[:-1]]), np.array(counts)
    chosen = np.zeros(len(counts), np.int64)
    total, gap_M = np.add.reduceat(gap_M, starts, dtype=np.int64), gap_M >> np.uint8(1)
    while True:
        next_total = np.add.reduceat(gap_M, starts, dtype=np.int64)
        gains = total - next_total > n
        if not gains.any():
            return chosen
        chosen += gains  # convex: a run that gains no more never gains again
        total, gap_M = next_total, gap_M >> np.uint8(1)


def bytes_most(shapes: Sequence[tuple[int, int, int]]) -> int:
    """Return the most bytes that low and high parts take, of (N, K, positions of a block) each.

    The gaps of a block sum up to the positions that are not kept, at most; so with any one r the
    high parts of a parameter sum up to N of these divided by 2^r, and no r takes fewer bits than
    the chosen one. Planes are padded to bytes: one of each bit, for each r.
    """
    bits = 0
    for blocks, k, area in shapes:
        count, most = blocks * k, blocks * (area - k)
        bits += min(count * (r + 1) + (most >> r) for r in range(area.bit_length() + 1))
    widest = max(area for _, _, area in shapes).bit_length()
    return -(-bits // 8) + sum(range(widest + 1)) + 1


def bytes_of(indices: Sequence[jax.Array], areas: Sequence[int]) -> jax.Array:
    """Return how many bytes low and high parts take, int32 []: counted where the indices are.

    Sums are exact: the gaps of a parameter sum up to its elements at most, which `optim` counts in
    int32 as well.
    """
    counts = np.array([index_NK.size for index_NK in indices], np.int32)
    sums = map(_sums, indices, areas)
    chosen, highs = zip(*map(_least, sums, counts.tolist()), strict=True)
    chosen_L = jnp.stack(chosen)
    size = (jnp.sum(jnp.stack(highs), dtype=jnp.int32) + 7) // 8
    for r in range(1, max(areas).bit_length() + 1):  # planes of one r are joined, then padded
        coded = jnp.sum(jnp.where(chosen_L == r, counts, 0), dtype=jnp.int32)
        size += r * ((coded + 7) // 8)
    return size


def _sums(index_NK: jax.Array, area: int) -> jax.Array:
    """Return sum(gap div 2^r) of a parameter for each r, until it is zero."""
    index_NK = index_NK.astype(jnp.int32)
    gap_NK = jnp.diff(index_NK, prepend=-1) - 1
    return jnp.stack([jnp.sum(gap_NK >> r, dtype=jnp.int32) for r in range(area.bit_length() + 1)])


def _least(sum_R: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the r that `parameters` chooses, and the bits of the high parts with it."""
    chosen = jnp.sum(sum_R[:-1] - sum_R[1:] > count, dtype=jnp.int32)  # convex: gains only shrink
    return chosen, sum_R[chosen] + count


def pack_low(gap: np.ndarray, r: int) -> bytes:
    """Return the low bits: r planes, least significant first, each zero-padded to a byte."""
    planes = [np.packbits((gap & np.uint32(1 << b)) != 0) for b in range(r)]
    return b"".join(plane.tobytes() for plane in planes)


def low_bytes(count: int, r: int) -> int:
    """Return the number of bytes that `pack_low` gives for `count` gaps."""
    return r * -(-count // 8)


def unpack_low(data: np.ndarray, count: int, r: int, name: str) -> np.ndarray:
    """Return the low bits of `count` gaps, int64; the inverse of `pack_low`.

    Raises:
      WireError: A padding bit is set; it is `name` in errors.
    """
    low = np.zeros(count, np.uint32)
    for b, plane in enumerate(data.reshape(r, -(-count // 8))):
        bits = np.unpackbits(plane)
        if bits[count:].any():
            raise WireError(f"{name}: padding bits are set, expected zeros")
        low |= bits[:count].astype(np.uint32) << np.uint32(b)
    return low.astype(np.int64)


def pack_high(high: np.ndarray) -> bytes:
    """Return the high parts in unary: one stream, zero-padded to a byte."""
    ends = np.cumsum(high.astype(np.int64) + 1) - 1
    bits = np.zeros(ends[-1] + 1, np.uint8)
    bits[ends] = 1
    return np.packbits(bits).tobytes()


def unpack_high(data: np.ndarray, count: int, name: str) -> np.ndarray:
    """Return the `count` high parts in the whole of `data`, int64; the inverse of `pack_high`.

    Raises:
      WireError: There are fewer or more, or bytes after the last; they are `name` in errors.
    """
    ends = np.flatnonzero(np.unpackbits(data).view(bool))  # of bools, NumPy finds them faster
    if len(ends) != count:
        raise WireError(f"{name}: {len(ends)} indices, expected {count}")
    if ends[-1] // 8 + 1 != len(data):
        raise WireError(f"{name}: bytes after the last index, expected the end")
    high = ends.copy()
    high[1:] -= ends[:-1] + 1
    return high
