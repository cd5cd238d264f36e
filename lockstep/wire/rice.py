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

AT_ONCE = 2**15  # gaps whose wide numbers stay in a processor's cache


def gaps(index_NK: np.ndarray) -> np.ndarray:
    """Return the gaps to code before indices that ascend within a block: [N * K], their dtype."""
    k, flat = index_NK.shape[1], index_NK.ravel()
    gap = flat.copy()
    gap[1:] -= flat[:-1]
    gap -= 1
    gap[::k] = flat[::k]  # across blocks it has wrapped
    return gap


def indices(gap: np.ndarray, k: int) -> np.ndarray:
    """Return the indices that int64 gaps represent: [N, K]; the inverse of `gaps`."""
    end_NK = np.cumsum(gap + 1).reshape(-1, k)  # in one: many short sums are slow
    before_N1 = np.concatenate([[[0]], end_NK[:-1, -1:]])
    index_NK: np.ndarray = end_NK - (before_N1 + 1)
    return index_NK


def high_parts(gap_M: np.ndarray, counts: Sequence[int], parameters: Sequence[int]) -> np.ndarray:
    """Return gap div 2^r, to code in unary: for each run of `counts` gaps its r of `parameters`."""
    high_M, begin = np.empty_like(gap_M), 0
    for count, r in zip(counts, parameters, strict=True):
        run = slice(begin, begin := begin + count)
        np.right_shift(gap_M[run], r, out=high_M[run])
    return high_M


def parameters(gap_M: np.ndarray, counts: Sequence[int]) -> list[int]:
    """Return the Rice parameter of each run of `counts` gaps: the smallest r with fewest bits.

    bits(r) = n (r + 1) + sum(gap div 2^r) is convex in r: take the first that the next does not
    beat. The next's sum is smaller by half at least, and by sum(gap) / 2^r at most. So the next is
    better for each r with 3 n 2^r <= sum(gap), and for none with n 2^r >= sum(gap): three are left.
    """
    starts, n = np.cumsum([0, *counts[:-1]]), np.array(counts)
    most = np.add.reduceat(gap_M, starts, dtype=np.int64) // (3 * n)
    first = [int(x).bit_length() for x in most]
    high_M, sums = high_parts(gap_M, counts, first), []
    for _ in range(3):
        sums.append(np.add.reduceat(high_M, starts, dtype=np.int64))
        high_M >>= 1
    gains = (sums[0] - sums[1] > n).astype(int) + (sums[1] - sums[2] > n)
    return [r + int(more) for r, more in zip(first, gains, strict=True)]


def bytes_most(shapes: Sequence[tuple[int, int, int]]) -> int:
    """Return the most bytes that Rice-coded gaps take, of (N, K, positions of a block) each.

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
    """Return how many bytes Rice-coded gaps take, int32 []: counted where the indices are.

    Sums are exact: the gaps of a parameter sum up to its elements at most, which `optim` counts in
    int32 as well.
    """
    counts = np.array([index_NK.size for index_NK in indices], np.int32)
    chosen, highs = map(jnp.stack, zip(*map(_least, indices), strict=True))
    size = (jnp.sum(highs + counts, dtype=jnp.int32) + 7) // 8
    for r in range(1, max(areas).bit_length() + 1):  # planes of one r are joined, then padded
        coded = jnp.sum(jnp.where(chosen == r, counts, 0), dtype=jnp.int32)
        size += r * ((coded + 7) // 8)
    return size


def _least(index_NK: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the Rice r that `parameters` chooses for a parameter, and its sum(gap div 2^r)."""
    n, index_NK = index_NK.size, index_NK.astype(jnp.int32)
    gap_NK = jnp.diff(index_NK, axis=1) - 1
    gap_M = jnp.concatenate([index_NK[:, :1], gap_NK], axis=1).reshape(-1)
    total = jnp.sum(index_NK[:, -1] + 1, dtype=jnp.int32) - n
    first = 32 - jax.lax.clz(total // (3 * n))
    sums = jnp.sum(gap_M >> (first + jnp.arange(3))[:, None], axis=1, dtype=jnp.int32)
    gains = jnp.sum(sums[:2] - sums[1:] > n, dtype=jnp.int32)
    return first + gains, sums[gains]


def pack_low(gaps: Sequence[np.ndarray], r: int) -> bytes:
    """Return the gaps' low bits: r planes, least significant first, zero-padded to a byte."""
    planes, gap = [], np.concatenate(gaps)
    for b in range(r):
        if b % 8 == 0:  # NumPy packs bytes 30 times as fast as wider numbers
            byte = (gap >> b).astype(np.uint8)
        planes.append(np.packbits(byte & np.uint8(1 << b % 8)).tobytes())
    return b"".join(planes)


def low_bytes(count: int, r: int) -> int:
    """Return the number of bytes that the low bits of `count` gaps take in a Rice code."""
    return r * -(-count // 8)


def unpack_low(data: np.ndarray, count: int, r: int, name: str) -> np.ndarray:
    """Return the low bits of `count` gaps; the inverse of `pack_low`.

    Raises:
      WireError: A padding bit is set; it is `name` in errors.
    """
    low, planes = np.zeros(count, np.uint8), data.reshape(r, -(-count // 8))
    for b, plane in enumerate(planes):
        bits = np.unpackbits(plane)
        if bits[count:].any():
            raise WireError(f"{name}: padding bits are set, expected zeros")
        if b == 8:
            low = low.astype(np.uint32)
        low |= bits[:count] << low.dtype.type(b)
    return low


def pack_high(high: np.ndarray) -> bytes:
    """Return the gaps' high parts in unary, Rice's way: one stream, zero-padded to a byte."""
    bits = []
    for first in range(0, len(high), AT_ONCE):
        bits_of_each = high[first : first + AT_ONCE].astype(np.int64)
        bits_of_each[1:] += 1  # so that the sums are where they end
        ends = np.cumsum(bits_of_each)  # of narrower numbers six times slower
        bits.append(np.zeros(ends[-1] + 1, np.uint8))
        bits[-1][ends] = 1
    return np.packbits(np.concatenate(bits)).tobytes()


def unpack_high(data: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` high parts of gaps in the whole of `data`, int64; inverts `pack_high`.

    Raises:
      WireError: There are fewer or more, or bytes after the last.
    """
    ends = np.flatnonzero(np.unpackbits(data).view(bool))  # of bools, NumPy finds them faster
    if len(ends) != count:
        raise WireError(f"high parts: {len(ends)} indices, expected {count}")
    if ends[-1] // 8 + 1 != len(data):
        raise WireError("high parts: bytes after the last index, expected the end")
    high: np.ndarray = np.diff(ends, prepend=-1)
    high -= 1
    return high
