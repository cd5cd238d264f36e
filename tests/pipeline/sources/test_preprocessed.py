"""Preprocessed data: what becomes of the rows of parquet files, and what is refused of them."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lockstep.programs.columns import split
from pipeline import sources
from pipeline.runfile.data import DataPreprocessed, Limit
from pipeline.sources.provider import Fetched
from pipeline.sources.token_files import preprocessed
from pipeline.sources.token_files.preprocessed import Parquet
from pipeline.tokens.shards import write_shards
from tests.errors import check_names, refused
from tests.pipeline.sources.corpora import on_hub
from tests.pipeline.sources.options import fetch_into, options, refusal
from tests.pipeline.sources.test_local import put_tokenizer
from tests.pipeline.tokens.shards_folder import open_shards

ROW = 4
ALL = {
    "inputs": [[1, 2, 3, 4], [5, 6, 7, 8]],
    "labels": [[-100, 2, -100, 4], [5, 6, 7, -100]],
    "position_ids": [[0, 1, 0, 1], [0, 1, 2, 3]],
    "sequence_lengths": [[2, 1], [4]],
}


def put(path: Path, columns: dict, **how: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path, **how)


def rows_of(*firsts: int) -> dict:
    """Rows of inputs alone, by their first token."""
    return {"inputs": [list(range(first, first + ROW)) for first in firsts]}


def fetch(source: object, tmp_path: Path, limit: Limit | None = None) -> Fetched:
    return fetch_into(tmp_path / "out", DataPreprocessed(source=str(source)), limit)


def sequences(fetched: Fetched, tmp_path: Path, of: str = "train") -> list[list[int]]:
    """What training reads of it."""
    write_shards(tmp_path / "out", fetched)
    found = open_shards(tmp_path / "out", of, fetched.source["row_tokens"])
    return found.take(np.arange(len(found))).tolist()


# ---- Rows ----


def test_all_columns_of_a_row_come_out_as_they_were_written(root, tmp_path):
    put(root / "train-0.parquet", ALL | {"text": ["not", "looked at"]})
    fetched = fetch(root, tmp_path)
    assert fetched.columns == ("inputs", "labels", "position_ids", "sequence_ids")
    found = split(np.array(sequences(fetched, tmp_path)), fetched.columns)
    assert found.inputs.tolist() == ALL["inputs"]
    assert found.labels.tolist() == ALL["labels"]
    assert found.position_ids.tolist() == ALL["position_ids"]
    # two sequences and padding; one that fills its row
    assert found.sequence_ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert (fetched.token_size_in_bytes, fetched.source["row_tokens"]) == (4, ROW)


def test_rows_of_which_no_label_counts_are_warned_of(root, tmp_path):
    # the first token of a row is never predicted
    unlabelled = {"inputs": [[1, 2, 3, 4]] * 2, "labels": [[-100] * 4, [1, -100, -100, -100]]}
    put(root / "train-0.parquet", unlabelled)
    put(root / "train-1.parquet", {"inputs": [[1, 2, 3, 4]], "labels": [[-100, -100, -100, 4]]})
    put(root / "test-0.parquet", unlabelled)
    assert fetch(root, tmp_path).warnings == (
        f"{root}: 2 of 3 train rows have no label that a loss counts",
        f"{root}: 2 of 2 held_out rows have no label that a loss counts",
    )


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([[1, 1, 1, 1]], [[0, 1, 2, 3]]),
        ([[0, 2, 0, 0, 2, 0]], [[0, 0, 1, 1]]),  # none of its own for no tokens
        ([[]], [[0, 0, 0, 0]]),
        ([[3], [], [1, 2]], [[0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 1, 2]]),
    ],
)
def test_each_token_is_given_the_number_of_its_sequence(root, tmp_path, lengths, expected):
    lists = pa.array(lengths, pa.list_(pa.int64()))
    put(root / "a.parquet", rows_of(*range(len(lengths))) | {"sequence_lengths": lists})
    fetched = fetch(root, tmp_path)
    found = split(np.array(sequences(fetched, tmp_path)), fetched.columns)
    assert found.sequence_ids.tolist() == expected


def test_packed_rows_without_labels_count_no_padding_and_nothing_over_a_border(root, tmp_path):
    packed = {"inputs": [[1, 2, 3, 4, 5, 6], [7] * 6], "sequence_lengths": [[2, 3], [1, 0, 5]]}
    put(root / "a.parquet", packed)
    fetched = fetch(root, tmp_path)
    assert fetched.columns == ("inputs", "labels", "sequence_ids")
    found = split(np.array(sequences(fetched, tmp_path)), fetched.columns)
    assert found.inputs.tolist() == packed["inputs"]
    assert found.labels.tolist() == [[-100, 2, -100, 4, 5, -100], [-100, -100, 7, 7, 7, 7]]
    assert fetched.warnings[1:] == ()
    put(root / "a.parquet", packed | {"labels": packed["inputs"]})  # given, so they count
    again = fetch(root, tmp_path / "again")
    found = split(np.array(sequences(again, tmp_path / "again")), again.columns)
    assert found.labels.tolist() == packed["inputs"]
    assert "3 labels count at the first token" in again.warnings[-1]


@pytest.mark.parametrize(
    "column",
    [("attention_mask", [1, 1]), ("loss_mask", [True, False]), ("weights", [1.0, 0.5])],
    ids=lambda column: column[0],
)
def test_numbers_for_each_token_that_nothing_reads_are_refused(root, tmp_path, column):
    name, values = column
    put(root / "a.parquet", {"inputs": [[1, 2]], name: [values], "id": [7]})
    check_names(refusal(fetch, root, tmp_path), root / "a.parquet", name, "labels")


@pytest.mark.parametrize(
    ("columns", "refused"),
    [
        ({}, True),
        ({"labels": [[-100, 2, -100, 4]]}, True),
        ({"labels": [[-100, 2, -100, -100]]}, False),  # the rest is padding
        ({"sequence_lengths": [[2, 2]]}, False),
    ],
)
def test_positions_that_begin_anew_need_lengths(root, tmp_path, columns, refused):
    put(root / "a.parquet", {"inputs": [[1, 2, 3, 4]], "position_ids": [[0, 1, 0, 1]]} | columns)
    if refused:
        check_names(refusal(fetch, root, tmp_path), "position_ids", "row 0", "sequence_lengths")
    else:
        assert "position_ids" in fetch(root, tmp_path).columns


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), ROW)], ids=str
)
def test_lists_of_any_integers_are_read(root, tmp_path, kind):
    put(root / "a.parquet", {"inputs": pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], kind)})
    assert sequences(fetch(root, tmp_path), tmp_path) == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_rows_keep_their_order_over_row_groups_shards_and_files(root, tmp_path, monkeypatch):
    monkeypatch.setattr(preprocessed, "SHARD_NUMBERS", 5 * ROW)
    put(root / "train-1.parquet", rows_of(*range(100, 107)))
    put(root / "train-0.parquet", rows_of(*range(13)), row_group_size=3)
    put(root / "test-0.parquet", rows_of(50))
    fetched = fetch(root, tmp_path)
    assert [file.tokens // ROW for file in fetched.files] == [5, 5, 3, 5, 2, 1]
    assert [file.name for file in fetched.files[2:4]] == [
        "train-0.parquet, rows 10 to 12",
        "train-1.parquet, rows 0 to 4",
    ]
    found = sequences(fetched, tmp_path)
    assert [row[0] for row in found] == [*range(13), *range(100, 107)]
    assert sequences(fetched, tmp_path, "held_out") == [[50, 51, 52, 53]]
    assert fetched.source["rows"] == {"train": 20, "held_out": 1}
    put(root / "train-0.parquet", {"inputs": [*rows_of(*range(7))["inputs"], [1, 2, 3, -7]]})
    assert "0.parquet: column inputs, row 7: found -7" in refusal(fetch, root, tmp_path / "again")


def test_a_tokenizer_beside_the_files_comes_along_and_bounds_their_ids(root, tmp_path):
    put(root / "train/0.parquet", rows_of(0, 4))
    put_tokenizer(root / "tokenizer.json", 8)
    assert fetch(root, tmp_path).vocab_size == 8
    assert (tmp_path / "out/tokenizer/tokenizer.json").is_file()
    put(root / "train/0.parquet", rows_of(0, 5))
    message = refusal(fetch, root, tmp_path / "again")
    assert "train/0.parquet: column inputs, row 1: found 8, expected a token id" in message
    assert message.endswith("from 0 and below 8")


# ---- Splits ----


@pytest.mark.parametrize(
    ("names", "train", "held_out", "warning"),
    [
        (["train-0", "test-0", "val-0"], ["train-0"], ["val-0"], "1 files of split test are not"),
        (["train/0", "dev/0", "dev/1"], ["train/0"], ["dev/0", "dev/1"], None),
        (["default/train/0", "default/val/1"], ["default/train/0"], ["default/val/1"], None),
        (["train-0", "train-1"], ["train-0"], ["train-1"], "no name says what to hold out, so"),
        (["a", "validation"], ["a"], ["validation"], None),
        (["trained", "train-0", "val.0"], ["train-0"], ["val.0"], "1 files without a split in th"),
        ([".hidden/a", ".a", "b", "Test-1"], ["b"], ["Test-1"], None),
    ],
)
def test_names_say_what_is_held_out(root, tmp_path, names, train, held_out, warning):
    for number, name in enumerate(names):
        put(root / f"{name}.parquet", rows_of(number))
    fetched = fetch(root, tmp_path)
    assert fetched.source["files"] == {
        "train": [f"{name}.parquet" for name in train],
        "held_out": [f"{name}.parquet" for name in held_out],
    }
    assert len(fetched.warnings) == (warning is not None)
    assert warning is None or warning in fetched.warnings[0]
    expected = [names.index(name) for name in train]
    assert [row[0] for row in sequences(fetched, tmp_path)] == expected


# ---- Limits and surveys ----


@pytest.mark.parametrize(
    ("limit", "firsts", "read"),
    [
        ({"files": 2}, [0, 1, 2, 10, 11, 12], 2),
        ({"tokens": 5 * ROW + 3}, [0, 1, 2, 10, 11], 2),
        ({"tokens": 3 * ROW}, [0, 1, 2], 1),
        ({"steps": 2, "batch": 2, "max_seq_len": ROW}, [0, 1, 2, 10], 2),
        ({"tokens": 99 * ROW}, [0, 1, 2, 10, 11, 12, 20, 21, 22], 3),
    ],
)
def test_a_limit_takes_the_first_rows(root, tmp_path, limit, firsts, read):
    for number in range(3):
        put(root / f"train-{number}.parquet", rows_of(*range(10 * number, 10 * number + 3)))
    put(root / "val-0.parquet", rows_of(90))
    fetched = fetch(root, tmp_path, Limit(**limit))
    assert [row[0] for row in sequences(fetched, tmp_path)] == firsts
    assert len(fetched.source["files"]["train"]) == read
    wanted = options(tmp_path / "store", Limit(**limit))
    survey = sources.survey(DataPreprocessed(source=str(root)), wanted)
    train = [file for file in survey.files if file.split == "train"]
    assert (len(train), survey.train_files) == (read, 3)
    whole = limit.get("tokens", 0) % ROW
    assert sum(file.tokens for file in train) == len(firsts) * ROW + whole


def test_a_survey_says_what_there_is_without_reading_rows(root, tmp_path):
    put(root / "train-0.parquet", {"inputs": [[1, 2, 3, 4], None, [5, 6]]})
    put(root / "test-0.parquet", ALL)
    survey = sources.survey(DataPreprocessed(source=str(root)), options(tmp_path / "store"))
    assert [(file.name, file.split, file.tokens) for file in survey.files][1:] == [
        ("test-0.parquet", "held_out", 8)
    ]
    assert survey.files[0].size == (root / "train-0.parquet").stat().st_size
    assert not (tmp_path / "store").exists()


# ---- What is refused ----


TWO = [[1, 2], [3, 4]]
EMPTY, LARGE = (
    pa.array([[]], pa.list_(pa.int32())),
    pa.array([[2**63 + 1, 2]], pa.list_(pa.uint64())),
)
LONG = [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"text": ["a"]}, ["text", "inputs"]),
        ({"inputs": [1, 2]}, ["inputs", "int64"]),
        ({"inputs": [[1.0]]}, ["inputs", "double"]),
        ({"inputs": [[1, 2], [3, 4, 5], [6, 7]]}, ["inputs", "row 1", "3 numbers", 2]),
        ({"inputs": TWO, "labels": [[1, 2], [3]]}, ["labels", "row 1", "1 numbers", 2]),
        ({"inputs": TWO, "position_ids": LONG}, ["position_ids", "row 0", "3 numbers", 2]),
        ({"inputs": EMPTY}, ["inputs", "row 0", "an empty list"]),
        ({"inputs": [[1, 2], None]}, ["inputs", "row 1", "null"]),
        ({"inputs": [*TWO, [5, None]]}, ["inputs", "row 2", "null"]),
        ({"inputs": [[1, 2], [-1, 2]]}, ["inputs", "row 1", -1, 2**31]),
        ({"inputs": [[1, 2], [-100, 2]]}, ["inputs", "row 1", -100, 2**31]),
        ({"inputs": [[2**31, 2]]}, ["inputs", "row 0", "found 2147483648"]),
        ({"inputs": LARGE}, ["inputs", "row 0", 2**63 + 1]),
        ({"inputs": TWO, "labels": [[1, -100], [-1, 4]]}, ["labels", "row 1", -1, -100]),
        ({"inputs": [[1, 2]], "position_ids": [[0, 2]]}, ["position_ids", "row 0", 2]),
        ({"inputs": TWO, "sequence_lengths": [[2], [1, 1, 1]]}, ["sequence_lengths", "row 1", 3]),
        ({"inputs": TWO, "sequence_lengths": [[2], [-1, 1]]}, ["sequence_lengths", "row 1", -1]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_a_row_may_not_have_is_named_by_file_column_and_row(root, tmp_path, columns, named):
    put(root / "val-0.parquet", rows_of(0))
    put(root / "train-0.parquet", columns)
    check_names(refusal(fetch, root, tmp_path), root / "train-0.parquet", *named)


def test_files_of_other_columns_or_other_rows_are_refused(root, tmp_path):
    put(root / "train-0.parquet", ALL)
    put(root / "train-1.parquet", {name: ALL[name] for name in ("inputs", "labels")})
    message = refusal(fetch, root, tmp_path)
    assert "train-1.parquet: found columns inputs, labels, expected inputs, labels, posi" in message
    assert message.endswith(f"as in {root / 'train-0.parquet'}")
    put(root / "train-1.parquet", {"inputs": [[1, 2, 3]]} | dict.fromkeys(ALL, [[0, 0, 0]]))
    message = refusal(fetch, root, tmp_path / "again")
    assert "train-1.parquet: column inputs, row 0: found 3 numbers, expected 4" in message


def test_a_file_that_changes_while_it_is_read_is_refused(root, tmp_path, monkeypatch):
    put(root / "train-0.parquet", rows_of(1, 2))
    put(root / "other", rows_of(1, 2, 3))
    hashed = preprocessed.sha256_file

    def hash_then_change(path):
        os.replace(root / "other", path)
        return hashed(path)

    monkeypatch.setattr(preprocessed, "sha256_file", hash_then_change)
    message = refusal(fetch, root, tmp_path)
    assert message.startswith(f"{root / 'train-0.parquet'}: changed while it was read")


def test_a_column_that_is_there_twice_is_one_line(root, tmp_path):
    table = pa.Table.from_arrays([pa.array([[1, 2]]), pa.array([[3, 4]])], ["inputs", "inputs"])
    parquet.write_table(table, root / "train.parquet")
    assert "column inputs is there twice, expected once" in refusal(fetch, root, tmp_path)


def test_a_few_bytes_that_unpack_to_a_row_without_end_are_refused_unread(
    root, tmp_path, monkeypatch
):
    monkeypatch.setattr("pipeline.sources.token_files.preprocessed.ROW_TOKENS", 1000)
    put(root / "train.parquet", {"inputs": [[7] * 2001, [7]]})
    monkeypatch.setattr(Parquet, "_first_length", pytest.fail)
    message = refusal(fetch, root, tmp_path)
    assert message.endswith(
        "column inputs has 2002 numbers in 2 rows, expected at most 1000 in a row"
    )


def test_no_parquet_file_is_one_line(root, tmp_path):
    put(root / "a.parquet", rows_of(0, 1))
    content = (root / "a.parquet").read_bytes()
    (root / "a.parquet").write_bytes(content[:-10])
    assert refusal(fetch, root, tmp_path).endswith("expected a parquet file")
    # one whose data alone are damaged
    (root / "a.parquet").write_bytes(content[:4] + b"\xff" * 20 + content[24:])
    message = refusal(fetch, root, tmp_path / "again")
    assert message.startswith(f"{root / 'a.parquet'}: ")


def test_a_flipped_bit_in_the_name_of_a_column_is_one_line(root, tmp_path):
    path = root / "a.parquet"
    parquet.write_table(pa.table(rows_of(0) | {"other": [1]}), path, store_schema=False)
    content = path.read_bytes()
    places = [found.start() for found in re.finditer(b"inputs|other", content)]
    assert len(places) > 2
    for number, place in enumerate(places):
        flipped = bytearray(content)
        flipped[place] ^= 0x80  # no longer UTF-8
        path.write_bytes(flipped)
        message = refusal(fetch, root, tmp_path / str(number))
        assert message.startswith(f"{path}: ") and message.endswith("expected a parquet file")


def test_a_file_without_rows_is_said_and_nothing_but_such_is_refused(root, tmp_path):
    none = {"inputs": pa.array([], pa.list_(pa.int32()))}
    put(root / "train-0.parquet", none)
    put(root / "train-1.parquet", rows_of(3))
    put(root / "val-0.parquet", none)
    fetched = fetch(root, tmp_path)
    assert [row[0] for row in sequences(fetched, tmp_path)] == [3]
    assert fetched.warnings == (
        f"{root / 'train-0.parquet'}: has no rows",
        f"{root / 'val-0.parquet'}: has no rows",
    )
    put(root / "train-1.parquet", none)
    assert "found no rows to train on" in refusal(fetch, root, tmp_path / "again")


def test_a_folder_that_is_not_there_or_has_no_parquet_is_refused(root, tmp_path):
    message = refusal(fetch, tmp_path / "nothing", tmp_path)
    assert message.startswith("model.LLM.data_location.Preprocessed: found no folder ")
    assert "or owner/name of a dataset on the hub" in message
    (root / "a.txt").touch()
    assert "found no file that ends in .parquet" in refusal(fetch, root, tmp_path / "again")
    put(root / "test-0.parquet", rows_of(0))
    assert "found only held-out files, test-0.parquet" in refusal(
        fetch, root, tmp_path / "once-more"
    )


def test_a_file_that_may_not_be_read_is_refused(root, tmp_path, monkeypatch):
    put(root / "a.parquet", rows_of(0))
    monkeypatch.setattr("os.access", lambda path, mode: False)  # the tests may read anything
    assert "a.parquet: no permission, expected a readable file" in refusal(fetch, root, tmp_path)


def test_without_pyarrow_the_extra_is_named(root, tmp_path, monkeypatch):
    put(root / "a.parquet", rows_of(0))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = refusal(fetch, root, tmp_path)
    assert "pyarrow is not installed" in message and "[parquet]" in message


# ---- On the hub ----


def test_a_dataset_of_the_hub_gives_what_the_folder_gives(root, tmp_path, monkeypatch):
    names = [f"data/{name}.parquet" for name in ("train-0", "train-1", "validation-0")]
    for name in names:
        put(root / name, ALL)
    put_tokenizer(root / "tokenizer.json", 64)
    expected = sequences(fetch(root, tmp_path / "a"), tmp_path / "a")
    files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*.*")}
    with on_hub(monkeypatch, tmp_path, "ours/rows", files | {"README.md": b"rows"}) as hub:
        commit = hub.datasets["ours/rows"].refs["main"]
        location = DataPreprocessed(source=" ours/rows\n")
        survey = sources.survey(location, options(tmp_path / "store"))
        fetched = fetch(location.source, tmp_path / "b")
        assert sequences(fetched, tmp_path / "b") == expected
        assert (fetched.vocab_size, fetched.source["commit"]) == (64, commit)
        hub.datasets["ours/rows"].commit(files | {"data/train-1.parquet": b"no parquet"})
        with refused("train-1.parquet", "parquet"):
            fetch(location.source, tmp_path / "c")
    assert [(file.name, file.tokens) for file in survey.files] == [(name, None) for name in names]


def test_a_limit_of_tokens_fetches_no_more_than_it_needs(root, tmp_path, monkeypatch):
    contents = {}
    for number in range(9):
        put(root / "a.parquet", rows_of(number))
        contents[f"train-{number}.parquet"] = (root / "a.parquet").read_bytes()
    with on_hub(monkeypatch, tmp_path, "ours/rows", contents) as hub:
        fetched = fetch("ours/rows", tmp_path / "b", Limit(tokens=2 * ROW))
        paths = {path for method, path, _ in hub.elsewhere if method == "GET"}
    assert list(fetched.source["files"]["train"]) == ["train-0.parquet", "train-1.parquet"]
    assert len(paths) == 4 + 1  # as many as are fetched at once, and what is held out
    assert json.dumps(fetched.source)
