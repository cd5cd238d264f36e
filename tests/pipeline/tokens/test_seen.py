"""The share of held-out windows that stand in the train split, beside a search of all of them."""

import hashlib

import numpy as np
import pytest

from pipeline.net.origin import Origin
from pipeline.tokens import seen
from pipeline.tokens.rows import ArrayRows, RowArray
from pipeline.tokens.shards import read_shards
from tests.pipeline.tokens.shards_folder import shards_folder

ROWS = ArrayRows(arrays=(RowArray(name="x", dtype="float32", shape=(4,)),))


def some(size: int, seed: int, high: int = 900) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, high, size)


def searched(held_out: np.ndarray, train: np.ndarray) -> float:
    def windows(tokens: np.ndarray) -> list[tuple[int, ...]]:
        return [tuple(tokens[n : n + 32].tolist()) for n in range(len(tokens) - 31)]

    known = {*windows(train)}
    return float(np.mean([window in known for window in windows(held_out)]))


@pytest.mark.parametrize("size", [2, 4])
def test_the_share_is_that_of_a_search_over_files_and_chunks(tmp_path, monkeypatch, size):
    """Copies of which each begins or ends within a file, a chunk, or at a border of them."""
    train, held_out = some(700, 1), some(400, 2)
    held_out[:50], held_out[180:231], held_out[370:] = train[90:140], train[330:381], train[:30]
    monkeypatch.setattr(seen, "CHUNK_TOKENS", 60)
    folder = shards_folder(
        tmp_path, np.split(train, [100, 355]), np.split(held_out, [207]), size=size
    )
    found = seen.share(folder, read_shards(folder))
    assert found == searched(held_out, train) == pytest.approx((19 + 20) / 369)


def test_of_a_large_split_a_sample_of_windows_tells_the_share(tmp_path, monkeypatch):
    train, held_out = some(9000, 1), some(6000, 2)
    held_out[1000:3000] = train[4000:6000]
    folder = shards_folder(tmp_path, [train], [held_out])
    whole = seen.share(folder, read_shards(folder))
    monkeypatch.setattr(seen, "MOST", 600)
    assert seen.sampled(read_shards(folder).split("held_out")) == 10
    assert len(seen.windows(held_out, 10)) < 800
    sample = seen.share(folder, read_shards(folder))
    assert sample != whole == pytest.approx(0.33, abs=0.01) and abs(sample - whole) < 0.06


def test_a_window_has_the_same_hash_on_every_machine():
    digest = hashlib.sha256(seen.windows(some(500, 3)).astype("<u8").tobytes()).hexdigest()
    assert digest.startswith("5b8336925b025143")


def test_a_share_that_nobody_knows_is_none(tmp_path):
    short = shards_folder(tmp_path / "short", [some(700, 1)], [some(20, 2)])
    assert seen.share(short, read_shards(short)) is None  # no window
    none = shards_folder(tmp_path / "none", [some(700, 1)])
    assert seen.share(none, read_shards(none)) is None
    packed = shards_folder(
        tmp_path / "packed", [some(700, 1)], [some(700, 1)], columns=("inputs", "labels")
    )
    assert seen.share(packed, read_shards(packed)) is None
    listed = read_shards(shards_folder(tmp_path / "all", [some(700, 1)], [some(700, 1)]))
    assert seen.share(tmp_path / "all", listed) == 1
    far = listed.files[0].model_copy(
        update={"sha256": None, "origin": Origin(url="https://a.org/b", size=1400)}
    )
    streamed = listed.model_copy(update={"files": (far, *listed.files[1:])})
    assert seen.share(tmp_path / "all", streamed) is None
    arrays = listed.model_copy(update={"rows": ROWS})
    assert seen.share(tmp_path / "all", arrays) is None
