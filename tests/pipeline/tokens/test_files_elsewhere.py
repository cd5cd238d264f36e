"""Files elsewhere: what is read of them, and what is expected to be read next."""

from pathlib import Path

import numpy as np

from pipeline.runfile import Network
from pipeline.tokens.ids import check_ids
from pipeline.tokens.sequences import Sequences
from tests.pipeline.sources.options import refusal
from tests.pipeline.tokens.shards_folder import (
    IN_ORDER,
    SEEDED,
    FakeStreams,
    edit,
    files_of,
    open_shards,
    send_away,
    shards_folder,
)


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
