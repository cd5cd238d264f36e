"""A safetensors file in pieces: the library's own bytes, or nothing."""

import json
import os
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from lockstep.errors import LockstepError
from lockstep.transcript import tensorfile
from lockstep.transcript.tensorfile import DTYPE_OF_CODE, TensorFile, TensorSpec, pieces, spec_of
from lockstep.transcript.trees import load_nested, load_tree, save_tree
from tests.errors import refused

RNG = np.random.default_rng(0)
MIXED = {
    f"of {name}": RNG.integers(0, 2, (3, 5)).astype(name) for name in DTYPE_OF_CODE.values()
} | {
    'é/"\\\n\x01\x7f\u2028😀': np.ones(3, np.float32),  # what a name may be
    "Z": np.ones(1, np.int32),
    "a": np.ones(1, np.int32),
    "\ufffd": np.ones(1, np.int32),
    "😀": np.ones(1, np.int32),
    "scalar": np.array(7, np.float64),
    "nothing": np.empty((2, 0, 3), ml_dtypes.bfloat16),
}


def write(path: Path, tensors: dict[str, np.ndarray], metadata: dict | None = None) -> None:
    specs = {name: spec_of(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    tensorfile.write(path, specs, lambda name: pieces(tensors[name]), metadata)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- Writing ----


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"é": '"\n'}])
@pytest.mark.parametrize("piece", [1, 7, 2**21])
def test_the_bytes_are_those_of_the_library(tmp_path, monkeypatch, metadata, piece):
    monkeypatch.setattr(tensorfile, "PIECE", piece)
    for tensors in (MIXED, dict(reversed(MIXED.items())), {"a": np.ones(3, np.float16)}):
        write(tmp_path / "file", tensors, metadata)
        assert (tmp_path / "file").read_bytes() == save(tensors, metadata)
    if metadata != {}:  # of which the library makes a header that is no JSON
        write(tmp_path / "file", {}, metadata)
        assert (tmp_path / "file").read_bytes() == save({}, metadata)
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize("shape", [(1, 1), (3, 500), (257, 300), (256, 512), (0, 3), (3, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "complex64"])
def test_pieces_of_a_matrix_are_its_transpose(monkeypatch, shape, dtype):
    monkeypatch.setattr(tensorfile, "PIECE", 1000)
    matrix = RNG.integers(0, 200, shape).astype(dtype)
    strided = np.repeat(matrix, 2, axis=1)[:, ::2]
    for array in (matrix, matrix[::-1], np.asfortranarray(matrix), strided):
        found = list(pieces(array, transposed=True))
        assert all(piece.flags.c_contiguous and piece.dtype == dtype for piece in found)
        whole = np.concatenate([np.empty(shape[::-1], dtype)[:0], *found])
        np.testing.assert_array_equal(whole, array.T)
        found = list(pieces(array))
        assert all(piece.flags.c_contiguous for piece in found)
        flat = np.concatenate([np.empty(0, dtype), *found])
        np.testing.assert_array_equal(flat, array.ravel())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([np.ones(3, np.float32)], "4 bytes are missing"),
        ([np.ones(5, np.float32)], "-4 bytes are missing"),
        ([np.ones(4, np.float64)], "piece of float64"),
        ([np.ones(4, ">f4")], "piece of >f4"),
    ],
)
def test_pieces_that_do_not_fit_the_spec_leave_no_file(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        tensorfile.write(tmp_path / "file", {"a": TensorSpec("F32", (4,))}, lambda _: values)
    assert names_in(tmp_path) == []


def test_a_dtype_that_a_file_cannot_hold_is_named():
    with refused("dtype complex128", "bool", error=ValueError):
        spec_of(np.complex128, (1,))


# ---- Reading ----


def test_tensors_come_back_with_dtype_shape_and_bytes(tmp_path):
    save_file(MIXED, tmp_path / "file", {"format": "pt"})
    file = TensorFile(tmp_path / "file")
    assert set(file) == set(MIXED) and len(file) == len(MIXED)
    for name, expected in MIXED.items():
        found = file[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
        assert not found.flags.writeable or found.size == 0
    assert file.nbytes == sum(tensor.nbytes for tensor in MIXED.values())


def test_a_header_of_any_length_is_read(tmp_path):
    """The format has once had headers that were not filled up, so tensors may lie at any byte."""
    for name in ("a", "ab", "abc", "abcd"):
        entry = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        header = json.dumps({"__metadata__": None} | entry).encode()
        values = np.array([1, 2], np.float32)
        data = len(header).to_bytes(8, "little") + header + values.tobytes()
        (tmp_path / "file").write_bytes(data)
        np.testing.assert_array_equal(TensorFile(tmp_path / "file")[name], values)
        assert TensorFile(tmp_path / "file").metadata == {}


def broken(entry: dict, size: int = 8) -> bytes:
    whole = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry
    header = json.dumps({"a": whole}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        broken({"data_offsets": [8, 16]}),
        broken({"shape": [2**63, 2**63]}),
        broken({"dtype": "F31"}),
        broken({}, size=7),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    with refused("file:", ", expected a safetensors file"):
        TensorFile(tmp_path / "file")


def test_an_unknown_dtype_and_a_vanished_file_are_named(tmp_path):
    (tmp_path / "file").write_bytes(broken({"dtype": "F4", "shape": [16]}))
    file = TensorFile(tmp_path / "file")
    assert file.specs["a"].shape == (16,)
    with refused("file: a", "F4", "BOOL"):
        file["a"]
    (tmp_path / "file").write_bytes(broken({}))
    file = TensorFile(tmp_path / "file")
    (tmp_path / "file").unlink()
    with refused("file: a"):
        file["a"]


# ---- Trees come back as they were saved, or not at all ----


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
    with refused("tensor b", value):
        load_tree(tmp_path / "tree", TREE | {"b": np.zeros(2, np.float32)})


def test_a_tensor_within_another_is_refused_by_name(tmp_path):
    for names in (["a", "a/b"], ["a/b", "a/b/c", "a/bb"]):
        save_file(dict.fromkeys(names, np.zeros(1)), tmp_path / "tree")
        with pytest.raises(LockstepError, match="tree: has 'a/b.*', but 'a.*' is a tensor"):
            load_nested(tmp_path / "tree")


def test_a_tensor_of_another_shape_is_refused_before_its_bytes_are_read(tmp_path):
    """A stranger's file may be as large as the disk allows."""
    path, size = tmp_path / "tree", 2**32
    said = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    header = json.dumps(said).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)  # sparse: no disk is taken
    tracemalloc.start()
    with refused("tensor a", "uint8", "float32"):
        load_tree(path, {"a": np.ones(2, np.float32)})
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_words_beside_the_arrays_are_refused_since_nobody_reads_them(tmp_path):
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "tree", metadata={"verified_by": "me"})
    with refused("tree: metadata", "{'verified_by': 'me'}"):
        load_nested(tmp_path / "tree")
