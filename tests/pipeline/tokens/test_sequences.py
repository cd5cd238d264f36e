"""Sequences: the whole ones of each file in turn, in their split's order, wherever files are."""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.programs.permutation import permute
from pipeline.runfile import Network
from pipeline.runfile.data import ShuffleSeeded
from pipeline.tokens import files as token_files
from pipeline.tokens import mixture
from pipeline.tokens.ids import check_ids
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import ZEROS, Part, ShardFile
from tests.errors import refused
from tests.pipeline.sources.options import refusal
from tests.pipeline.tokens.shards_folder import (
    IN_ORDER,
    SEEDED,
    FakeStreams,
    edit,
    elsewhere,
    files_of,
    open_shards,
    send_away,
    shards_folder,
    write,
)


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "pipeline.net.transfers.stream", SimpleNamespace(Streams=FakeStreams)
    )


@pytest.mark.parametrize("size", [2, 4])
def test_sequences_are_the_whole_ones_of_each_file_in_turn(tmp_path, size):
    # 10, 8 and 3 tokens, in sequences of 4: two, two and none.
    train = [np.arange(10), 100 + np.arange(8), 200 + np.arange(3), 300 + np.arange(4)]
    sequences = open_shards(shards_folder(tmp_path, train, size=size), "train", 4)
    assert len(sequences) == 5
    batch = sequences.take(np.arange(5))
    assert batch.dtype == np.int32
    assert batch.tolist() == [[*range(first, first + 4)] for first in (0, 4, 100, 104, 300)]


def test_files_are_opened_only_when_touched(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8), np.arange(8)])
    sequences = open_shards(folder, "train", 4)
    (folder / "train" / "00001.ds").unlink()
    assert sequences.take(np.array([0, 1])).shape == (2, 4)
    with pytest.raises(FileNotFoundError):
        sequences.take(np.array([2]))


def test_more_files_than_may_stay_open_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(token_files, "OPEN_FILES", 3)
    train = [np.full(4, number) for number in range(20)]
    sequences = open_shards(shards_folder(tmp_path, train), "train", 4)
    open_before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    for _ in range(2):
        assert sequences.take(np.arange(20))[:, 0].tolist() == list(range(20))
    if open_before:
        assert len(os.listdir("/proc/self/fd")) <= open_before + 4


def test_a_split_without_files_has_no_sequences(tmp_path):
    sequences = open_shards(shards_folder(tmp_path, [np.arange(8)]), "held_out", 4)
    assert len(sequences) == 0
    assert sequences.take(np.array([], np.int64)).shape == (0, 4)
    assert "expected one of the 0 held_out sequences" in refusal(sequences.take, np.array([0]))


def test_sequences_longer_than_every_file_are_refused_naming_both_lengths(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8), np.arange(11)])
    with refused("max_seq_len = 12", "11 tokens", str(folder / "train" / "00001.ds")):
        open_shards(folder, "train", 12)
    assert len(open_shards(folder, "train", 11)) == 1


@pytest.mark.parametrize("index", [-1, 4, 10**12])
def test_index_beyond_the_end_is_refused_naming_it_and_the_number(tmp_path, index):
    folder = shards_folder(tmp_path, [np.arange(16)], shuffle=SEEDED)
    sequences = open_shards(folder, "train", 4)
    with refused(f"sequence {index}, expected one of", "the 4 train sequences"):
        sequences.take(np.array([0, index]))


def test_a_file_cut_short_while_it_is_open_is_refused_with_its_name(tmp_path):
    for shuffle in (IN_ORDER, SEEDED):
        folder = shards_folder(tmp_path / shuffle.tag(), [np.arange(40)], shuffle=shuffle)
        sequences = open_shards(folder, "train", 4)
        sequences.take(np.arange(10))
        os.truncate(folder / "train" / "00000.ds", 45)
        with refused(str(folder / "train" / "00000.ds"), "45 bytes, expected at least"):
            sequences.take(np.arange(10))


def test_a_read_that_comes_in_pieces_is_whole_in_the_end(tmp_path, monkeypatch):
    """The system reads no more than 2 GB at once."""
    folder = shards_folder(tmp_path, [np.arange(400)])
    preadv = os.preadv

    def at_most_three(descriptor: int, buffers, start: int) -> int:
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[:3]], start)

    monkeypatch.setattr(os, "preadv", at_most_three)
    taken = open_shards(folder, "train", 4).take(np.arange(100))
    assert taken.ravel().tolist() == list(range(400))


# ---- The order of a split, its parts mixed and shuffled as documented ----


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


@settings(max_examples=40)
@given(st.data())
def test_a_position_does_not_depend_on_the_others_asked_with_it(tmp_path_factory, data):
    block = data.draw(st.sampled_from([2, 5, 64]))
    counts = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=5).filter(any))
    files, parts = files_of(counts, 2), MIXES[data.draw(st.sampled_from(["one", "lengths"]))]
    shuffle = data.draw(st.sampled_from([IN_ORDER, SEEDED]))
    of = {"part": [0, 2, 1, 2, 0][: len(counts)], "parts": tuple(parts)} if parts else {}
    folder = shards_folder(tmp_path_factory.mktemp("data"), files, shuffle=shuffle, **of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.tokens.sequences.BLOCK_POSITIONS", block)
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


# ---- Files elsewhere: what is read of them, and what is expected next ----


def test_rows_of_files_elsewhere_are_the_same_through_the_streams_that_training_has(tmp_path):
    files = files_of([40, 60, 30], 4)
    folder = shards_folder(tmp_path / "shards", files, shuffle=SEEDED)
    here = open_shards(folder, "train", 4).take(np.arange(130))
    send_away(folder, tmp_path / "store", range(3))
    sequences = open_shards(folder, "train", 4, Network(stream_cache_mb=4e-4))
    spans = [sequences.take(np.arange(start, start + 13)) for start in range(0, 130, 13)]
    np.testing.assert_array_equal(np.concatenate(spans), here)


def test_a_file_elsewhere_is_read_only_as_far_as_its_tokens_go(tmp_path, streams):
    folder = shards_folder(tmp_path / "shards", [np.arange(40)])
    send_away(folder, tmp_path / "store", {0})
    edit(folder, lambda document: document["files"][0].update(tokens=19))
    sequences = open_shards(folder, "train", 4, network := Network(connections=3))
    assert len(sequences) == 4
    assert sequences.take(np.arange(4)).tolist() == np.arange(16).reshape(4, 4).tolist()
    assert FakeStreams.last.network is network


def far_sequences(tmp_path: Path, shuffle=IN_ORDER, cache_bytes=10**6) -> Sequences:
    """2,000 sequences of 4 tokens elsewhere."""
    data = [np.arange(8000)]
    folder = shards_folder(tmp_path / "shards", data, data, vocab=None, shuffle=shuffle)
    send_away(folder, tmp_path / "store", {0, 1})
    return open_shards(folder, "train", 4, Network(stream_cache_mb=cache_bytes / 1e6))


def expected_after(sequences: Sequences, start: int, stop: int) -> list[int]:
    """Takes a span; which sequences of the file are then expected."""
    FakeStreams.last.expected = []
    sequences.take(np.arange(start, stop))
    ranges = [(first // 8, last - first) for _, first, last in FakeStreams.last.expected]
    assert all(length == 8 for _, length in ranges)
    return [sequence for sequence, _ in ranges]


def test_what_follows_is_expected_once_and_no_more_than_was_read_but_for_the_first(
    tmp_path, streams
):
    sequences = far_sequences(tmp_path)
    assert expected_after(sequences, 0, 4) == list(range(4, 12))
    assert expected_after(sequences, 4, 8) == list(range(12, 16))
    assert expected_after(sequences, 8, 12) == list(range(16, 24))
    assert expected_after(sequences, 1000, 1002) == list(range(1002, 1006))  # far: it begins anew
    assert expected_after(sequences, 100, 102) == list(range(102, 106))
    assert expected_after(sequences, 1994, 1998) == [1998, 1999]
    assert expected_after(sequences, 1998, 2000) == []
    held_out = open_shards(tmp_path / "shards", "held_out", 4)
    assert expected_after(held_out, 0, 4) == []  # it is read at once


def test_the_next_round_is_expected_in_whatever_order_peers_ask_for_this_one(tmp_path, streams):
    sequences, expected = far_sequences(tmp_path), []
    for first in range(800, 900, 32):
        for span in (24, 0, 16, 8):
            expected += expected_after(sequences, first + span, first + span + 8)
        verified = max(800, first - 8)  # a verifier looks at the round before
        assert not expected_after(sequences, verified, verified + 8)
        assert expected == sorted(set(expected))
        assert expected[-1] == 800 + 2 * (first + 32 - 800) - 1


def test_no_more_is_expected_than_a_quarter_of_the_cache_holds(tmp_path, streams):
    sequences = far_sequences(tmp_path, cache_bytes=4 * 5 * 8 + 31)
    assert expected_after(sequences, 0, 4) == list(range(4, 9))
    assert expected_after(sequences, 4, 8) == list(range(9, 13))


def test_what_is_expected_of_shuffled_data_is_what_is_read_next(tmp_path, streams):
    sequences = far_sequences(tmp_path, shuffle=SEEDED)
    sequences.take(np.arange(20, 25))
    expected, FakeStreams.last.read_ranges = FakeStreams.last.expected, []
    sequences.take(np.arange(25, 35))
    assert FakeStreams.last.read_ranges == expected[:10]
    assert len({start for _, start, _ in expected[:10]}) == 10


def test_files_elsewhere_need_not_be_in_the_folder_and_are_checked_when_read(tmp_path, streams):
    data = np.arange(16)
    data[6] = 700
    folder = shards_folder(tmp_path / "shards", [data, np.arange(8)])
    send_away(folder, tmp_path / "store", {0})
    check_ids(folder, 500, 4)
    sequences = open_shards(folder, "train", 4, vocab_size=500)
    message = refusal(sequences.take, np.array([1]))
    assert message == "far/0.ds: found token id 700 at token 6, expected ids below 500"
