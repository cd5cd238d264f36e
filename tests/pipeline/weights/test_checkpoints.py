"""A checkpoint comes back as it was saved, or the one before it does."""

import shutil

import numpy as np

from pipeline.transcript.state import State
from pipeline.weights.checkpoints import Checkpoints
from tests.pipeline.weights.test_trees import same


def state(value: float) -> State:
    own = ({"delta": {"w": np.full((2, 3), value, np.float32)}},) * 2
    return State({"w": np.full(4, value, np.float32)}, {"count": np.array(3, np.int32)}, own)


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
