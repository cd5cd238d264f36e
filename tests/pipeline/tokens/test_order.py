"""The order of a split: its parts mixed and shuffled as documented, wherever the files are."""

import hashlib
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.programs.permutation import permute
from pipeline.runfile.data import ShuffleSeeded
from pipeline.tokens import mixture
from pipeline.tokens.ids import check_ids
from pipeline.tokens.shards import ZEROS, Part, ShardFile
from tests.pipeline.sources.options import refusal
from tests.pipeline.tokens.shards_folder import (
    IN_ORDER,
    SEEDED,
    elsewhere,
    files_of,
    open_shards,
    send_away,
    shards_folder,
    write,
)

OTHER = tuple(range(32))


def of_pass(shuffle, number: int):
    """The shuffle of a pass over the data."""
    if number == 0 or shuffle == IN_ORDER:
        return shuffle
    digest = hashlib.sha256(bytes(shuffle.seed) + number.to_bytes(4, "little")).digest()
    return ShuffleSeeded(seed=tuple(digest))


def reference(
    files: list[np.ndarray], part: Sequence[int], parts: Sequence[Part], shuffle, width: int, number
) -> list[list[int]]:
    """All rows of a pass of the train split, as the documentation says it, in plain lists."""
    shuffle = of_pass(shuffle, number)
    parts = [p.model_copy(update={"shuffle": of_pass(p.shuffle, number)}) for p in parts]
    rows: list[list[list[int]]] = [[] for _ in range(max(1, len(parts)))]
    for number, file in enumerate(files):
        for start in range(0, len(file) - width + 1, width):
            rows[part[number] if parts else 0].append(file[start : start + width].tolist())
    if not parts:
        order = rows[0]
    else:
        counts = mixture.counts([p.weight for p in parts], [len(of) for of in rows])
        order = []
        for which, drawn in zip(*mixture.place(counts, np.arange(counts.sum())), strict=True):
            item, of = drawn % len(rows[which]), rows[which]
            if isinstance(seeded := parts[which].shuffle, ShuffleSeeded):
                item = permute(bytes(seeded.seed), np.array([item]), len(of))[0]
            order.append(of[item])
    if isinstance(shuffle, ShuffleSeeded):
        images = permute(bytes(shuffle.seed), np.arange(len(order)), len(order))
        order = [order[image] for image in images]
    return order


MIXES = {
    "one": [],
    "weights": [Part(shuffle=IN_ORDER, weight=0.7), Part(shuffle=SEEDED, weight=0.3)],
    "lengths": [
        Part(shuffle=SEEDED, weight=None),
        Part(shuffle=IN_ORDER, weight=None),
        Part(shuffle=ShuffleSeeded(seed=OTHER), weight=None),
    ],
    "repeated": [Part(shuffle=SEEDED, weight=1.0), Part(shuffle=SEEDED, weight=9.0)],
}


@pytest.mark.parametrize("away", [(), (1, 3, 4), range(6)], ids=["here", "some", "elsewhere"])
@pytest.mark.parametrize("shuffle", [IN_ORDER, SEEDED], ids=["in-order", "seeded"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("size", "columns"), [(2, 1), (4, 2)])
def test_rows_are_those_of_the_reference_wherever_the_files_are(
    tmp_path, streams, mix, shuffle, away, size, columns
):
    names = ("inputs", "labels")[:columns]
    parts, files = MIXES[mix], files_of([5, 3, 0, 9, 1, 12], 3 * columns)
    part = [number % 2 for number in range(6)] if parts else [0] * 6
    passes = [reference(files, part, parts, shuffle, 3 * columns, number) for number in (0, 1)]
    assert (passes[0] == passes[1]) == (shuffle == IN_ORDER and mix == "one")
    expected = sum(passes, [])
    of = {"shuffle": shuffle, "part": part, "parts": tuple(parts), "columns": names}
    folder = shards_folder(tmp_path / "shards", files, files[:1], size=size, **of)
    send_away(folder, tmp_path / "store", away)
    sequences = open_shards(folder, "train", 3, passes=2)
    assert (sequences.count, len(sequences)) == (30, len(expected)) == (30, 60)
    order = np.random.default_rng(1).integers(0, 60, 50)
    taken = sequences.take(order)
    assert taken.dtype == np.int32
    assert taken.tolist() == [expected[index] for index in order]
    spans = [sequences.take(np.arange(i, i + 4)).tolist() for i in range(0, 60, 4)]
    assert sum(spans, []) == expected
    held_out = open_shards(folder, "held_out", 3)
    assert held_out.take(np.arange(5)).ravel().tolist() == files[0][: 15 * columns].tolist()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_position_does_not_depend_on_the_others_asked_with_it(tmp_path_factory, data):
    block = data.draw(st.sampled_from([2, 5, 64]))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any))
    files, parts = files_of(counts, 2), MIXES[data.draw(st.sampled_from(["one", "lengths"]))]
    shuffle = data.draw(st.sampled_from([IN_ORDER, SEEDED]))
    of = {"part": [0, 2, 1, 2, 0][: len(counts)], "parts": tuple(parts)} if parts else {}
    folder = shards_folder(tmp_path_factory.mktemp("data"), files, shuffle=shuffle, **of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.tokens.sequences.BLOCK", block)
        sequences = open_shards(folder, "train", 2)
        whole = open_shards(folder, "train", 2).take(np.arange(len(sequences)))
        for _ in range(5):
            asked = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=8))
            np.testing.assert_array_equal(sequences.take(np.array(asked, np.int64)), whole[asked])


def test_a_part_with_a_weight_and_no_sequence_is_refused_and_one_without_is_not(tmp_path):
    train = [np.arange(36), np.arange(3)]
    for name, weight in (("weighted", 0.5), ("by-length", None)):
        parts = (Part(shuffle=IN_ORDER, weight=weight),) * 2
        shards_folder(tmp_path / name, train, part=[0, 1], parts=parts)
    message = refusal(open_shards, tmp_path / "weighted", "train", 4)
    assert "parts.1: no sequence of 4 tokens, expected some for its weight, 0.5" in message
    assert len(open_shards(tmp_path / "by-length", "train", 4)) == 9


def zeros(count: int, part: int = 0) -> ShardFile:
    file = ShardFile(
        path="train/90000.ds", split="train", tokens=count, sha256=None, name="zeros", part=part
    )
    return elsewhere(file, ZEROS, 2 * count)


def test_more_sequences_than_can_be_mixed_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.tokens.mixture.MOST_INDICES", 100)
    parts = (Part(shuffle=IN_ORDER, weight=None),) * 2
    write(tmp_path, [zeros(4 * 100), zeros(4, part=1)], parts=parts)
    message = refusal(open_shards, tmp_path, "train", 4)
    assert "101 sequences in 2 parts, expected at most 100" in message
    write(tmp_path, [zeros(4 * 99), zeros(4, part=1)], parts=parts)
    assert len(open_shards(tmp_path, "train", 4)) == 100


def test_ten_billion_sequences_are_mixed_as_few_are(tmp_path):
    parts = (Part(shuffle=IN_ORDER, weight=0.7), Part(shuffle=IN_ORDER, weight=0.3))
    write(tmp_path, [zeros(4 * 7 * 10**9), zeros(4 * 3 * 10**9, part=1)], parts=parts)
    sequences = open_shards(tmp_path, "train", 4)
    assert len(sequences) == 10**10
    assert not sequences.take(np.array([0, 10**10 - 1])).any()


def test_zeros_without_end_are_read_from_nowhere(tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "pipeline.net.transfers.stream", None
    )  # an import of it would fail
    write(tmp_path, [zeros(2**48)], shuffle=SEEDED)
    check_ids(tmp_path, 10, 2048)
    sequences = open_shards(tmp_path, "train", 2048)
    assert len(sequences) == 2**37
    taken = sequences.take(np.array([0, 5, 2**37 - 1]))
    assert (taken.shape, taken.dtype) == ((3, 2048), np.int32)
    assert not taken.any()
