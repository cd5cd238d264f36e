"""Rows that are not tokens: their bytes, worked out by hand, and what is made of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from pydantic import TypeAdapter, ValidationError

from parts.workload.python.lockstep_worker.rows import decoded
from pipeline.runfile.data import ShuffleDontShuffle
from pipeline.stage.keys import PROJECT
from pipeline.tokens import rows as rows_room
from pipeline.tokens.ids import check_ids
from pipeline.tokens.rows import ArrayRows, FileRows, RowArray, TokenRows, encode
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import Shards, read_shards, write_shard, write_shards

CASES = json.loads((PROJECT / "tests" / "golden" / "rows.json").read_text())["cases"]
ROWS = TypeAdapter(TokenRows | ArrayRows | FileRows)


def of_arrays(**arrays: np.ndarray) -> ArrayRows:
    return ArrayRows(
        arrays=tuple(
            RowArray(name=name, dtype=array.dtype.name, shape=array.shape[1:])
            for name, array in arrays.items()
        )
    )


def decode(rows: ArrayRows | FileRows, rows_NW: np.ndarray):
    """What a workload is given, by the code of its worker."""
    return decoded(rows_NW, rows.model_dump(mode="json"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["rows"]["kind"])
def test_rows_decode_as_worked_out_by_hand(case):
    rows = ROWS.validate_json(json.dumps(case["rows"]))
    assert rows.model_dump(mode="json") == case["rows"]
    words_NW = np.array(case["words"], "<i4")
    assert [row.tobytes() for row in words_NW] == [bytes.fromhex(row) for row in case["bytes"]]
    found, expected = decode(rows, words_NW), case["decoded"]
    if isinstance(found, dict):
        assert {name: array.tolist() for name, array in found.items()} == expected
    elif isinstance(rows, FileRows):
        assert found == expected
    else:
        assert found.tolist() == expected and found.dtype == np.int64


def test_rows_of_arrays_encode_as_worked_out_by_hand():
    case = CASES[0]
    rows = ROWS.validate_json(json.dumps(case["rows"]))
    arrays = {
        array.name: np.array(case["decoded"][array.name], array.dtype) for array in rows.arrays
    }
    assert encode(rows, arrays).view("<i4").tolist() == case["words"]
    for name, array in decode(rows, encode(rows, arrays).view("<i4")).items():
        assert array.dtype == arrays[name].dtype and array.tobytes() == arrays[name].tobytes()


@given(
    st.lists(
        st.tuples(
            st.sampled_from([d for d in rows_room.Dtype.__args__ if d != "bfloat16"]),
            stn.array_shapes(min_dims=0, max_dims=3, max_side=4),
        ),
        min_size=1,
        max_size=4,
    ),
    st.data(),
)
def test_what_is_encoded_is_decoded_bit_for_bit(wanted, data):
    arrays = {
        f"a{number}": data.draw(stn.arrays(dtype, (3, *shape)))
        for number, (dtype, shape) in enumerate(wanted)
    }
    rows = of_arrays(**arrays)
    rows_NW = encode(rows, arrays)
    assert rows_NW.shape == (3, rows.words)
    for name, array in decode(rows, rows_NW.view("<i4")).items():
        assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
        assert array.tobytes() == np.ascontiguousarray(arrays[name]).tobytes()


def test_no_rows_decode_to_empty_arrays():
    rows = of_arrays(x=np.zeros((1, 2, 3), np.float32), y=np.zeros(1, np.int64))
    found = decode(rows, np.zeros((0, 8), np.int32))
    assert [array.shape for array in found.values()] == [(0, 2, 3), (0,)]


@pytest.mark.parametrize("shape", [(2, 7), (8,), (2, 8, 1)])
def test_rows_of_another_width_are_refused(shape):
    with pytest.raises(ValueError, match="words; 8 expected by their kind"):
        decode(FileRows(folder="x"), np.zeros(shape, np.int32))


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [("a", "float32", (1,)), ("a", "float32", (1,))],
        [("a/b", "float32", ())],
        [("..", "float32", ())],
        [("a", "object", ())],
        [("a", "float32", (2, 0))],
        [("a", "float32", (2**24 + 1,))],
    ],
)
def test_rows_that_cannot_be_are_refused(wrong):
    arrays = [{"name": n, "dtype": d, "shape": s} for n, d, s in wrong]
    with pytest.raises(ValidationError):
        ArrayRows.model_validate_json(json.dumps({"arrays": arrays}))


# ---- In shards ----

X = of_arrays(x=np.zeros((1, 4), np.uint32))


def folder_of(folder: Path, numbers: np.ndarray, rows: ArrayRows | FileRows | None = X, **more):
    how = {"format": 2, "token_size_in_bytes": 4, "vocab_size": None, "source": {"read": "a test"}}
    how |= {"shuffle": ShuffleDontShuffle(), "files": (write_shard(folder, "train", 0, numbers),)}
    write_shards(folder, Shards(**how | more, rows=rows))
    return folder


def test_words_of_any_value_are_read_as_they_are(tmp_path):
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 101, 2**32 - 100, 2**32 - 1]
    numbers = np.concatenate([np.array(edges, "<u4"), np.arange(2**32 - 8, 2**32, dtype="<u4")])
    folder = folder_of(tmp_path, numbers)
    data = Sequences(folder, read_shards(folder), "train", 4, vocab_size=7)
    rows_NW = data.take(np.arange(4))
    assert rows_NW.dtype == np.int32 and rows_NW.tobytes() == numbers.tobytes()
    check_ids(folder, 7, 4)  # there are none
    assert decode(X, rows_NW)["x"].ravel().tolist() == numbers.tolist()


def test_shards_say_what_a_row_is(tmp_path):
    listed = read_shards(folder_of(tmp_path / "a", np.zeros(8, "<u4")))
    assert listed.rows == X and listed.row_length == 4
    files = FileRows(folder="files")
    assert read_shards(folder_of(tmp_path / "b", np.zeros(8, "<u4"), files)).rows == files
    plain = read_shards(folder_of(tmp_path / "c", np.zeros(8, "<u4"), None))
    assert plain.rows is None and plain.row_length is None
    assert '"rows"' not in (tmp_path / "c" / "shards.json").read_text()


@pytest.mark.parametrize(
    "more", [{"vocab_size": 9}, {"token_size_in_bytes": 2}, {"columns": ("inputs", "labels")}]
)
def test_shards_of_rows_have_nothing_that_only_tokens_have(tmp_path, more):
    with pytest.raises(ValidationError, match="words of 4 bytes, no vocabulary"):
        folder_of(tmp_path, np.zeros(8, "<u4"), **more)
