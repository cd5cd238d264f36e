import hashlib
import tracemalloc

import numpy as np
import pytest

from lockstep.programs.permutation import MOST_INDICES, ROUNDS, permute

SEED = bytes(range(1, 33))


def permute_one(seed: bytes, index: int, n: int) -> int:
    """The same permutation in Python's integers, which never overflow."""
    half = 1
    while 4**half < n:
        half += 1
    modulus = 2**64
    while True:
        left, right = index >> half, index % 2**half
        for r in range(ROUNDS):
            x = right + int.from_bytes(hashlib.sha256(seed + bytes([r])).digest()[:8], "little")
            x %= modulus
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % modulus
            x = (x ^ x >> 27) * 0x94D049BB133111EB % modulus
            left, right = right, left ^ (x ^ x >> 31) % 2**half
        index = left << half | right
        if index < n:
            return index


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 1023, 1024, 1025, 2000, 65537])
def test_each_index_comes_exactly_once(n):
    np.testing.assert_array_equal(np.sort(permute(SEED, np.arange(n), n)), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 10**11, MOST_INDICES])
def test_arrays_give_what_integers_without_overflow_give(n):
    index_N = np.random.default_rng(0).integers(0, n, 50)
    expected = [permute_one(SEED, int(index), n) for index in index_N]
    assert permute(SEED, index_N, n).tolist() == expected


def test_golden_orders():
    assert permute(SEED, np.arange(10), 10).tolist() == [6, 7, 5, 2, 1, 9, 0, 4, 8, 3]
    assert permute(bytes(32), np.arange(10), 10).tolist() == [1, 7, 9, 0, 6, 8, 5, 4, 2, 3]
    far = [36_280_754_575, 82_167_152_510, 6_485_250_202]
    assert permute(SEED, np.array([0, 1, 10**11 - 1]), 10**11).tolist() == far
    widest = [3_867_050_405_854_974_734, 3_728_017_636_319_315_320, 1_750_711_465_677_819_305]
    assert permute(bytes(32), np.array([0, 1, MOST_INDICES - 1]), MOST_INDICES).tolist() == widest


def test_memory_is_that_of_the_indices_asked_for_however_many_there_are():
    index_N = np.arange(1000)
    permute(SEED, index_N, 10**11)
    tracemalloc.start()
    permute(SEED, index_N, 10**11)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 * index_N.nbytes


def test_an_index_alone_goes_where_it_goes_among_others():
    n = 12_345
    together = permute(SEED, np.arange(n), n)
    assert [int(permute(SEED, np.array([i]), n)[0]) for i in range(0, n, 997)] == (
        together[::997].tolist()
    )
    shaped = permute(SEED, np.arange(12).reshape(3, 4), n)
    np.testing.assert_array_equal(shaped, together[:12].reshape(3, 4))
    assert permute(SEED, np.array([], np.int64), n).shape == (0,)


@pytest.mark.parametrize(
    ("seed", "index", "n"),
    [(bytes(31), 0, 5), (SEED, 5, 5), (SEED, -1, 5), (SEED, 0, 0), (SEED, 0, MOST_INDICES + 1)],
)
def test_arguments_out_of_range_are_refused(seed, index, n):
    with pytest.raises(ValueError):
        permute(seed, np.array([index]), n)
