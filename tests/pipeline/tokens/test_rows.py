"""Rows that are not tokens: their bytes, worked out by hand, and what is made of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.runfile.data import ShuffleDontShuffle
from pipeline.stage.keys import PROJECT
from pipeline.tokens.ids import check_ids
from pipeline.tokens.rows import ArrayRows, encode
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import Shards, read_shards, write_shard, write_shards
from tests.pipeline.tokens.shards_folder import decoded, rows_of

CASES = json.loads((PROJECT / "tests" / "golden" / "rows.json").read_text())["cases"]


def test_rows_of_arrays_encode_as_worked_out_by_hand():
    case = CASES[0]
    rows = ArrayRows.model_validate_json(json.dumps(case["rows"]))
    arrays = {
        array.name: np.array(case["decoded"][array.name], array.dtype) for array in rows.arrays
    }
    assert encode(rows, arrays).view("<i4").tolist() == case["words"]
    for name, array in decoded(rows, encode(rows, arrays)).items():
        assert array.dtype == arrays[name].dtype and array.tobytes() == arrays[name].tobytes()


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

X = rows_of(x=np.zeros((1, 4), np.uint32))


def folder_of(folder: Path, numbers: np.ndarray, **more):
    how = {"format": 2, "token_size_in_bytes": 4, "vocab_size": None, "source": {"read": "a test"}}
    how |= {"shuffle": ShuffleDontShuffle(), "files": (write_shard(folder, "train", 0, numbers),)}
    write_shards(folder, Shards(**how | more, rows=X))
    return folder


def test_words_of_any_value_are_read_as_they_are(tmp_path):
    edges = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 101, 2**32 - 100, 2**32 - 1]
    numbers = np.concatenate([np.array(edges, "<u4"), np.arange(2**32 - 8, 2**32, dtype="<u4")])
    folder = folder_of(tmp_path, numbers)
    data = Sequences(folder, read_shards(folder), "train", 4, vocab_size=7)
    rows_NW = data.take(np.arange(4))
    assert rows_NW.dtype == np.int32 and rows_NW.tobytes() == numbers.tobytes()
    check_ids(folder, 7, 4)  # there are none
    assert decoded(X, rows_NW)["x"].ravel().tolist() == numbers.tolist()


@pytest.mark.parametrize(
    "more", [{"vocab_size": 9}, {"token_size_in_bytes": 2}, {"columns": ("inputs", "labels")}]
)
def test_shards_of_rows_have_nothing_that_only_tokens_have(tmp_path, more):
    with pytest.raises(ValidationError, match="words of 4 bytes, no vocabulary"):
        folder_of(tmp_path, np.zeros(8, "<u4"), **more)
