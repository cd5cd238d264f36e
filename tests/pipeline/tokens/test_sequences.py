"""Sequences: the whole ones of each file in turn, each read where it stands."""

import os
from pathlib import Path

import numpy as np
import pytest

from pipeline.tokens import files as token_files
from tests.pipeline.sources.options import refusal
from tests.pipeline.tokens.shards_folder import IN_ORDER, SEEDED, open_shards, shards_folder


@pytest.mark.parametrize("size", [2, 4])
def test_sequences_are_the_whole_ones_of_each_file_in_turn(tmp_path, size):
    # 10, 8 and 3 tokens, in sequences of 4: two, two and none.
    train = [np.arange(10), 100 + np.arange(8), 200 + np.arange(3), 300 + np.arange(4)]
    sequences = open_shards(shards_folder(tmp_path, train, size=size), "train", 4)
    assert len(sequences) == 5
    batch = sequences.take(np.arange(5))
    assert batch.dtype == np.int32
    assert batch.tolist() == [[*range(first, first + 4)] for first in (0, 4, 100, 104, 300)]


def test_a_file_that_divides_evenly_keeps_its_last_sequence(tmp_path):
    """Psyche's fixture has 3 x 2048 tokens, of which it makes two samples."""
    folder = shards_folder(tmp_path, [np.arange(6144) % 1000])
    assert len(open_shards(folder, "train", 2048)) == 3


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
    message = refusal(open_shards, folder, "train", 12)
    assert "max_seq_len = 12" in message
    assert "11 tokens" in message
    assert str(folder / "train" / "00001.ds") in message
    assert len(open_shards(folder, "train", 11)) == 1


@pytest.mark.parametrize("index", [-1, 4, 10**12])
def test_index_beyond_the_end_is_refused_naming_it_and_the_number(tmp_path, index):
    folder = shards_folder(tmp_path, [np.arange(16)], shuffle=SEEDED)
    sequences = open_shards(folder, "train", 4)
    message = refusal(sequences.take, np.array([0, index]))
    assert f"sequence {index}, expected one of" in message
    assert "the 4 train sequences" in message


def test_a_file_cut_short_while_it_is_open_is_refused_with_its_name(tmp_path):
    for shuffle in (IN_ORDER, SEEDED):
        folder = shards_folder(tmp_path / shuffle.tag(), [np.arange(40)], shuffle=shuffle)
        sequences = open_shards(folder, "train", 4)
        sequences.take(np.arange(10))
        os.truncate(folder / "train" / "00000.ds", 45)
        message = refusal(sequences.take, np.arange(10))
        assert str(folder / "train" / "00000.ds") in message
        assert "45 bytes, expected at least" in message


def test_a_read_that_comes_in_pieces_is_whole_in_the_end(tmp_path, monkeypatch):
    """The system reads no more than 2 GB at once."""
    folder = shards_folder(tmp_path, [np.arange(400)])
    preadv = os.preadv

    def at_most_three(descriptor: int, buffers, start: int) -> int:
        return preadv(descriptor, [memoryview(buffers[0]).cast("B")[:3]], start)

    monkeypatch.setattr(os, "preadv", at_most_three)
    taken = open_shards(folder, "train", 4).take(np.arange(100))
    assert taken.ravel().tolist() == list(range(400))
