"""Trees come back as they were saved, or not at all."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.errors import LockstepError
from pipeline.transcript.state import State
from pipeline.weights.checkpoint import Checkpoints, load_nested, load_tree, save_tree

TREE = {
    "layers": {"w": np.arange(12, dtype=np.float32).reshape(3, 4).T, "b": np.ones(2, np.float32)},
    "count": np.array(7, np.int32),
}


def state(value: float) -> State:
    own = ({"delta": {"w": np.full((2, 3), value, np.float32)}},) * 2
    return State({"w": np.full(4, value, np.float32)}, {"count": np.array(3, np.int32)}, own)


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


def test_a_truncated_file_is_refused_by_name(tmp_path):
    save_tree(tmp_path / "tree", TREE)
    (tmp_path / "tree").write_bytes((tmp_path / "tree").read_bytes()[:-1])
    with pytest.raises(LockstepError, match="tree: expected a safetensors file"):
        load_nested(tmp_path / "tree")


def test_the_newest_checkpoint_comes_back_and_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.newest(state(0)) is None
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), {"progress": {"step": step}})
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    saved = again.newest(state(0))
    assert (saved.step, saved.rest) == (3, {"progress": {"step": 3}})
    same(saved.state, state(3))
    again.close()
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()]
    assert sorted(kept) == ["2", "3"]


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(step), {})
    checkpoints.close()
    # what a flipped bit would do: orbax loads other arrays than were saved, without a word
    first, second = (tmp_path / "checkpoints" / str(step) / "state" for step in (1, 2))
    shutil.rmtree(second)
    shutil.copytree(first, second)
    again = Checkpoints(tmp_path / "checkpoints", keep=2)
    saved = again.newest(state(0))
    again.close()
    assert saved.step == 1
    same(saved.state, state(1))
    assert "checkpoint 2 is damaged" in caplog.text
