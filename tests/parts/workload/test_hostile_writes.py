"""A worker that writes beside its folder is noticed."""

import os

import pytest

from lockstep.errors import LockstepError
from parts.workload.process.watched import Watched


@pytest.fixture
def code(tmp_path):
    (tmp_path / "code" / "deep").mkdir(parents=True)
    (tmp_path / "code" / "model.py").write_text("x = 1")
    (tmp_path / "code" / "deep" / "data").write_text("y")
    return tmp_path / "code"


def test_folders_that_are_left_alone_are_unchanged(code):
    watched = Watched([code, code.parent / "not-there"])
    (code / "model.py").read_text()
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "model.pyc").touch()
    (code.parent / "beside").touch()
    assert watched.changed() == []
    watched.check("workload")


@pytest.mark.parametrize(
    "write, name",
    [
        (lambda code: (code / "model.py").write_text("x = 22"), "model.py"),
        (lambda code: (code / "deep" / "new").touch(), "deep/new"),
        (lambda code: (code / "deep" / "data").unlink(), "deep/data"),
        (lambda code: os.replace(code / "deep" / "data", code / "model.py"), "deep/data"),
        (lambda code: os.symlink("model.py", code / "link"), "link"),
        (lambda code: (code / "not-there").touch(), "not-there"),
    ],
)
def test_what_is_written_removed_or_added_is_named(code, write, name):
    watched = Watched([code, code / "not-there"])
    write(code)
    assert watched.changed()[0] == code / name
    with pytest.raises(LockstepError) as caught:
        watched.check("workload my_model:Model")
    assert str(caught.value).startswith(f"workload my_model:Model: {code / name}")
    assert "changed while it ran, expected it to write in its own folder only" in str(caught.value)


def test_same_size_and_time_with_another_inode_is_a_change(code):
    watched, path = Watched([code]), code / "model.py"
    status = path.stat()
    (code.parent / "other").write_text("x = 2")
    os.replace(code.parent / "other", path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert watched.changed() == [path]


def test_folder_that_is_removed_whole_is_a_change(code):
    watched = Watched([code])
    os.rename(code, code.parent / "away")
    assert watched.changed() == [code / "deep" / "data", code / "model.py"]
