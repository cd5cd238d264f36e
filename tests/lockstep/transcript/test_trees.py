"""Trees come back as they were saved, or not at all."""

import json
import os
import tracemalloc

import jax
import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn
from safetensors.numpy import save_file

from lockstep.errors import LockstepError
from lockstep.transcript.trees import load_nested, load_tree, save_tree

TREE = {
    "layers": {"w": np.arange(12, dtype=np.float32).reshape(3, 4).T, "b": np.ones(2, np.float32)},
    "count": np.array(7, np.int32),
}


def same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)


def test_a_tree_comes_back_scalars_and_transposed_arrays_included(tmp_path):
    save_tree(tmp_path / "tree.safetensors", TREE)
    same(load_tree(tmp_path / "tree.safetensors", TREE), TREE)
    same(load_nested(tmp_path / "tree.safetensors"), TREE)


def test_equal_trees_are_equal_files(tmp_path):
    save_tree(tmp_path / "a", TREE)
    save_tree(tmp_path / "b", {name: TREE[name] for name in reversed(TREE)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "tensor count is missing"),
        ({"count": TREE["count"], "x": TREE["count"]}, "tensor x is not expected"),
        ({"count": np.zeros(2, np.int32)}, r"tensor count is int32\[2\], expected int32\[\]"),
        ({"count": np.zeros((), np.int64)}, r"tensor count is int64\[\], expected int32\[\]"),
    ],
)
def test_a_tree_of_another_form_is_refused_by_name(tmp_path, tensors, said):
    save_file(tensors, tmp_path / "tree")
    with pytest.raises(LockstepError, match=said):
        load_tree(tmp_path / "tree", {"count": TREE["count"]})


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_value_that_is_no_number_is_refused_by_name(tmp_path, value):
    save_tree(tmp_path / "tree", TREE | {"b": np.array([0, value], np.float32)})
    with pytest.raises(LockstepError, match=f"tensor b has a value of {value}, expected numbers"):
        load_tree(tmp_path / "tree", TREE | {"b": np.zeros(2, np.float32)})


def test_a_truncated_file_is_refused_by_name(tmp_path):
    save_tree(tmp_path / "tree", TREE)
    (tmp_path / "tree").write_bytes((tmp_path / "tree").read_bytes()[:-1])
    with pytest.raises(LockstepError, match="tree: expected a safetensors file"):
        load_nested(tmp_path / "tree")


def test_a_tensor_within_another_is_refused_by_name(tmp_path):
    for names in (["a", "a/b"], ["a/b", "a/b/c", "a/bb"]):
        save_file(dict.fromkeys(names, np.zeros(1)), tmp_path / "tree")
        with pytest.raises(LockstepError, match="tree: tensor 'a/b.*', expected nothing within"):
            load_nested(tmp_path / "tree")


def test_a_dtype_that_numpy_lacks_is_refused_and_eight_bits_are_not(tmp_path):
    save_tree(tmp_path / "tree", {"x": np.ones(4, float8_e4m3fn)})
    assert load_nested(tmp_path / "tree")["x"].dtype == float8_e4m3fn
    whole = (tmp_path / "tree").read_bytes()
    (tmp_path / "tree").write_bytes(whole.replace(b"F8_E4M3", b"F8_E8M0"))
    with pytest.raises(LockstepError, match="tree: x is F8_E8M0, expected BOOL, U8"):
        load_nested(tmp_path / "tree")


def test_a_tensor_of_another_shape_is_refused_before_its_bytes_are_read(tmp_path):
    """A stranger's file may be as large as the disk allows."""
    path, size = tmp_path / "tree", 2**32
    said = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    header = json.dumps(said).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)  # sparse: no disk is taken
    tracemalloc.start()
    with pytest.raises(LockstepError, match="tensor a is uint8.*, expected float32"):
        load_tree(path, {"a": np.ones(2, np.float32)})
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_words_beside_the_arrays_are_refused_since_nobody_reads_them(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "tree", metadata={"verified_by": "me"})
    with pytest.raises(LockstepError, match="tree: metadata {'verified_by': 'me'}, expected none"):
        load_nested(tmp_path / "tree")
