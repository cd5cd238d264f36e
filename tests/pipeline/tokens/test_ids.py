"""Ids that no vocabulary or column may hold are refused with the file and the place."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.tokens import ids as token_ids
from pipeline.tokens.ids import check_file_ids, check_ids
from tests.pipeline.sources.options import refusal
from tests.pipeline.tokens.shards_folder import measure, open_shards, shards_folder, write


@pytest.mark.parametrize("at", [0, 9, 10, 15])
def test_id_beyond_the_vocabulary_is_refused_with_file_and_offset_where_read(tmp_path, at):
    data = np.arange(16)
    data[at] = 5000
    folder = shards_folder(tmp_path, [np.arange(16), data], vocab=5000)
    sequences = open_shards(folder, "train", 4)
    sequences.take(np.arange(4))
    message = refusal(sequences.take, np.array([7, 6, 5, 4, 0]))
    assert str(folder / "train" / "00001.ds") in message
    assert f"found token id 5000 at token {at}, expected ids below 5000" in message


def test_full_pass_finds_the_first_id_beyond_a_vocabulary_in_any_split(tmp_path, monkeypatch):
    monkeypatch.setattr(token_ids, "SCAN_TOKENS", 3)
    folder = shards_folder(tmp_path, [np.arange(8)], [np.array([1, 2, 3, 4, 777, 6, 888])])
    check_ids(folder, 889, 4)
    message = refusal(check_ids, folder, 777, 4)
    assert str(folder / "held_out" / "00000.ds") in message
    assert "found token id 777 at token 4, expected ids below 777" in message


def test_four_byte_id_that_int32_cannot_hold_is_refused_without_a_vocabulary(tmp_path):
    data = np.array([1, 2**31 - 1, 2**31, 4])
    folder = shards_folder(tmp_path, [data], size=4, vocab=None)
    sequences = open_shards(folder, "train", 2)
    assert sequences.take(np.array([0])).tolist() == [[1, 2**31 - 1]]
    assert "found token id 2147483648 at token 2" in refusal(sequences.take, np.array([1]))


def test_the_smaller_of_two_vocabularies_counts(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8)], vocab=6)
    for vocab_size, limit in ((5, 5), (7, 6), (None, 6)):
        sequences = open_shards(folder, "train", 4, vocab_size=vocab_size)
        message = refusal(sequences.take, np.array([1]))
        assert f"found token id {limit} at token {limit}, expected ids below {limit}" in message


def test_errors_also_say_what_a_file_was_called(tmp_path):
    folder = shards_folder(tmp_path, [np.array([1, 2, 99, 4])], vocab=50)
    names = {"train/00000.ds": "wiki/part-7.ds"}
    write(folder, measure(folder, 2, names), vocab=50)
    message = refusal(open_shards(folder, "train", 4).take, np.array([0]))
    assert f"{folder / 'train' / '00000.ds'} (wiki/part-7.ds): found token id 99" in message
    assert message == refusal(check_ids, folder, 50, 4)
    message = refusal(check_file_ids, folder / "train" / "00000.ds", 2, 50, "the file")
    assert message == "the file: found token id 99 at token 2, expected ids below 50"


def row_of_columns(**changed: tuple[int, int]) -> np.ndarray:
    """A row of 4 tokens, in columns; `changed`: the number at a place of a column."""
    columns = {"inputs": [1, 2, 3, 4], "labels": [2**32 - 100, 2, 3, 4], "position_ids": [0] * 4}
    for column, (place, number) in changed.items():
        columns[column][place] = number
    return np.concatenate(list(columns.values()))


def columns_folder(folder: Path, *rows: np.ndarray) -> Path:
    columns = ("inputs", "labels", "position_ids")
    return shards_folder(folder, [np.concatenate(rows)], size=4, vocab=10, columns=columns)


def test_columns_of_a_row_come_one_after_the_other_and_labels_keep_what_no_loss_counts(tmp_path):
    folder = columns_folder(tmp_path, row_of_columns(), row_of_columns(position_ids=(1, 99)))
    check_ids(folder, 10, max_seq_len=4)
    sequences = open_shards(folder, "train", 4)
    assert len(sequences) == 2
    ids = [1, 2, 3, 4, -100, 2, 3, 4]
    assert sequences.take(np.array([1, 0])).tolist() == [[*ids, 0, 99, 0, 0], [*ids, 0, 0, 0, 0]]
    message = refusal(open_shards, folder, "train", 9)
    assert "expected a train shard at least as long, in 3 columns" in message


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"inputs": (2, 10)}, "token id 10 at token 14, expected ids below 10"),
        ({"inputs": (2, 2**32 - 100)}, "token id 4294967196 at token 14, expected ids below 10"),
        ({"labels": (3, 10)}, "label 10 at token 19, expected ids below 10"),
        ({"labels": (0, 2**32 - 99)}, "label 4294967197 at token 16, expected ids below 10"),
        ({"position_ids": (0, 2**31)}, "position id 2147483648 at token 20, expected ids below 21"),
        ({"labels": (1, 77), "inputs": (3, 66)}, "token id 66 at token 15, expected"),
    ],
)
def test_what_no_column_may_hold_is_refused_naming_the_column(tmp_path, changed, found):
    folder = columns_folder(tmp_path, row_of_columns(), row_of_columns(**changed))
    sequences = open_shards(folder, "train", 4)
    sequences.take(np.array([0]))
    assert f"found {found}" in refusal(sequences.take, np.array([0, 1]))
    assert f"found {found}" in refusal(check_ids, folder, 10, 4)
