"""Rows as the user's code gets them: what the pipeline encodes, the worker decodes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from pydantic import TypeAdapter

from parts.workload.python.lockstep_worker.rows import decoded
from pipeline.stage.keys import PROJECT
from pipeline.tokens import rows as rows_room
from pipeline.tokens.rows import ArrayRows, FileRows, TokenRows, encode
from tests.pipeline.tokens.shards_folder import rows_of

CASES = json.loads((PROJECT / "tests" / "golden" / "rows.json").read_text())["cases"]
ROWS = TypeAdapter(TokenRows | ArrayRows | FileRows)


def decode(rows: ArrayRows | FileRows, rows_NW: np.ndarray):
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
    rows = rows_of(**arrays)
    rows_NW = encode(rows, arrays)
    assert rows_NW.shape == (3, rows.words)
    for name, array in decode(rows, rows_NW.view("<i4")).items():
        assert (array.dtype, array.shape) == (arrays[name].dtype, arrays[name].shape)
        assert array.tobytes() == np.ascontiguousarray(arrays[name]).tobytes()


@pytest.mark.parametrize("shape", [(2, 7), (8,), (2, 8, 1)])
def test_rows_of_another_width_are_refused(shape):
    with pytest.raises(ValueError, match="words; 8 expected by their kind"):
        decode(FileRows(folder="x"), np.zeros(shape, np.int32))
