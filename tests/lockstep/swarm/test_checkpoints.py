"""A checkpoint comes back as it was saved, or the one before it does."""

import gc
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.swarm.checkpoints import Checkpoints, Saved
from lockstep.transcript.state import State
from tests import tiny
from tests.errors import refused
from tests.lockstep.transcript.test_tensorfile import same

OPEN = Path("/proc/self/fd")  # the files that this process has open


def state(value: float) -> State:
    own = ({"delta": {"w": np.full((2, 3), value, np.float32)}},) * 2
    return State({"w": np.full(4, value, np.float32)}, {"count": np.array(3, np.int32)}, own)


def save(folder: Path, *steps: int) -> None:
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"progress": {"step": step}})


def newest(folder: Path) -> Saved | None:
    with Checkpoints(folder, keep=2) as checkpoints:
        return checkpoints.newest(state(0))


def test_the_newest_checkpoint_comes_back_and_only_the_newest_are_kept(tmp_path):
    assert newest(tmp_path / "checkpoints") is None
    save(tmp_path / "checkpoints", 1, 2, 3)
    saved = newest(tmp_path / "checkpoints")
    assert (saved.step, saved.extras) == (3, {"progress": {"step": 3}})
    same(saved.state, state(3))
    kept = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()]
    assert sorted(kept) == ["2", "3"]


def test_checkpoints_leave_neither_files_nor_threads_open(tmp_path):
    def left_open_by(*steps: int) -> np.ndarray:
        for step in steps:
            checkpoints.save(step, state(step), {})
        assert checkpoints.newest(state(0)).step == steps[-1]  # which is saved by then
        return np.array([len(list(OPEN.iterdir())), threading.active_count()])

    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        few, many = left_open_by(*range(3)), left_open_by(*range(3, 23))
    assert (many - few < 10).all(), "each of 20 checkpoints left one"  # some may just be ending


def test_a_save_that_fails_is_told_once_at_the_next_call_and_in_one_line(tmp_path):
    folder = tmp_path / "checkpoints"
    checkpoints, before = Checkpoints(folder, keep=2), {*threading.enumerate()}
    with pytest.raises(LockstepError) as caught, checkpoints:
        shutil.rmtree(folder)
        folder.write_bytes(b"")  # nothing can be saved in a file
        checkpoints.save(1, state(1), {})
        checkpoints.save(2, state(2), {})
    assert str(caught.value).startswith(f"{folder}: ")
    assert str(caught.value).endswith(", expected to write a checkpoint there")
    assert "\n" not in str(caught.value)
    begun = {thread.name for thread in threading.enumerate() if thread not in before}
    assert "write_metadata_after_commits" not in begun, "it would wait at the end of the process"
    checkpoints.close()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, caplog):
    save(tmp_path / "checkpoints", 1, 2)
    # what a flipped bit would do: orbax loads other arrays than were saved, without a word
    first, second = (tmp_path / "checkpoints" / str(step) / "state" for step in (1, 2))
    shutil.rmtree(second)
    shutil.copytree(first, second)
    saved = newest(tmp_path / "checkpoints")
    assert saved.step == 1
    same(saved.state, state(1))
    assert "checkpoint 2 is damaged" in caplog.text


def damaged(path: Path) -> Iterator[bytes]:
    """What a damaged disk may make of a file: a bit of it is another, or its end is gone."""
    content = path.read_bytes()
    for place in sorted({0, len(content) // 3, len(content) // 2, len(content) - 1}):
        changed = bytearray(content)
        changed[place : place + 1] = bytes(byte ^ 4 for byte in changed[place : place + 1])
        yield bytes(changed)
    yield content[: len(content) // 2]


@pytest.mark.long
def test_whatever_file_of_a_checkpoint_is_damaged_a_whole_one_comes_back(tmp_path, caplog, recwarn):
    folder = tmp_path / "checkpoints"
    save(folder, 1, 2)
    found = set()
    for name in tiny.contents(folder / "2"):
        for content in damaged(folder / "2" / name):
            again = shutil.copytree(folder, tmp_path / "again")
            (again / "2" / name).write_bytes(content)
            saved = newest(again)
            same(saved.state, state(saved.step))
            assert saved.extras == {"progress": {"step": saved.step}}
            found.add(saved.step)
            shutil.rmtree(again)
    gc.collect()
    assert found == {1, 2}
    # no traceback beside our line, and no coroutine that was never awaited
    assert {record.name for record in caplog.records} == {"lockstep.swarm.checkpoints"}
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def test_a_run_does_not_begin_anew_where_all_its_checkpoints_are_damaged(tmp_path):
    save(tmp_path / "checkpoints", 1)
    shutil.rmtree(tmp_path / "checkpoints" / "1" / "state")
    with refused("expected a whole checkpoint; start over"):
        newest(tmp_path / "checkpoints")
