"""Trees of arrays: their leaves by path, and that no two share a hash."""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.transcript.trees import flatten, tree_hash


class Momentum(NamedTuple):
    delta: object
    count: object


def test_flatten_names_keys_fields_and_places():
    tree = {"layers": ({"wq": np.ones(2)}, Momentum(np.zeros(3), np.int32(1))), "none": None}
    assert list(flatten(tree)) == ["layers/0/wq", "layers/1/delta", "layers/1/count"]


def test_flatten_of_a_bare_array_has_the_empty_path():
    assert list(flatten(np.ones(2))) == [""]


@pytest.mark.parametrize(
    "tree", [{"a/b": 1.0}, {"": 1.0}, {"a": {"": 1.0}}, OrderedDict([("0", 1.0), (0, 2.0)])]
)
def test_ambiguous_path_is_refused_with_its_name(tree):
    with pytest.raises(ValueError, match="ambiguous path"):
        flatten(tree)


def test_tree_hash_is_pinned():
    # Transcripts hold these: whoever changes the form changes the transcript's version.
    tree = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array(3, np.int32)}
    stream = b""
    for part in (b"a", b"int32", b"", b"\x03\x00\x00\x00"):
        stream += len(part).to_bytes(8, "little") + part
    for part in (b"b", b"float32", b"2,3", tree["b"].astype("<f4").tobytes()):
        stream += len(part).to_bytes(8, "little") + part
    assert tree_hash(tree) == hashlib.sha256(stream).hexdigest()


F32 = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"a": F32.reshape(2, 3), "b": F32}, id="shape"),
        pytest.param({"a": F32.view(np.int32), "b": F32}, id="dtype"),
        pytest.param({"a": F32, "b": F32, "c": F32[:0]}, id="empty leaf more"),
        pytest.param({"a": {"b": F32}, "b": F32}, id="deeper"),
    ],
)
def test_trees_that_differ_have_other_hashes(other):
    assert tree_hash(other) != tree_hash({"a": F32, "b": F32})


@pytest.mark.parametrize(
    "same",
    [
        pytest.param({"b": F32, "a": F32}, id="order of keys"),
        pytest.param({"a": jnp.asarray(F32), "b": F32}, id="jax array"),
        pytest.param({"a": F32.astype(">f4"), "b": F32}, id="big-endian"),
        pytest.param({"a": np.repeat(F32, 2)[::2], "b": F32}, id="not contiguous"),
    ],
)
def test_trees_that_hold_the_same_have_the_same_hash(same):
    assert tree_hash(same) == tree_hash({"a": F32, "b": F32})


def test_state_read_back_as_plain_dicts_has_the_same_hash():
    state = {"own": (Momentum(delta=F32, count=np.int32(7)),)}
    plain = {"own": {"0": {"count": np.int32(7), "delta": F32}}}
    assert tree_hash(state) == tree_hash(plain)


def test_transposed_array_is_hashed_in_c_order():
    matrix = F32.reshape(2, 3)
    assert tree_hash(matrix.T) == tree_hash(np.ascontiguousarray(matrix.T)) != tree_hash(matrix)


def test_bfloat16_and_scalars_are_hashed():
    half = jnp.arange(3, dtype=jnp.bfloat16)
    assert tree_hash({"a": half}) != tree_hash({"a": np.asarray(half).view(np.uint16)})
    assert tree_hash({"a": np.float32(0.0)}) != tree_hash({"a": np.float32(-0.0)})


@pytest.mark.parametrize("leaf", ["text", np.array([None])])
def test_leaf_that_is_no_number_is_refused_with_its_path(leaf):
    with pytest.raises(ValueError, match="'a/b' has dtype"):
        tree_hash({"a": {"b": leaf}})
