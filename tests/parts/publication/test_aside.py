"""Work aside: nothing is left of it, and what SIGKILL leaves is what `lockstep clean` removes."""

import os
import signal

import pytest

from parts.publication import aside
from pipeline.__main__ import clean
from pipeline.stage import signals


def test_nothing_is_left_of_it_after_an_error_either(tmp_path):
    runs = tmp_path / "data" / "runs"
    with pytest.raises(ValueError), aside.folder(runs, "verify", "again") as place:
        (place / "weights").write_text("x")
        raise ValueError
    assert not (tmp_path / "data").exists()


def test_what_was_there_before_stays(tmp_path):
    other = tmp_path / "data" / "runs" / "1234"
    other.mkdir(parents=True)
    with aside.folder(other.parent, "verify", "again") as place:
        assert list(place.iterdir()) == [] and place.parent == other.parent
    assert list(other.parent.iterdir()) == [other]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_request_to_stop_removes_it_and_says_what_the_same_command_does(
    tmp_path, monkeypatch, capfd, number, status
):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with aside.folder(tmp_path / "data" / "runs", "verify", "the same command begins again") as it:
        (it / "weights").write_text("x")
        signals._end(number, None)
        assert ended == [status] and not (tmp_path / "data").exists()
    assert capfd.readouterr().err.endswith("received; the same command begins again\n")


def test_clean_removes_what_a_kill_leaves(tmp_path, monkeypatch):
    runs = tmp_path / "data" / "runs"
    with monkeypatch.context() as patch:
        patch.setattr(aside.shutil, "rmtree", lambda *_, **__: None)  # as a kill would
        with aside.folder(runs, "verify", "again") as place:
            (place / "weights").write_text("x")
    assert place.exists()
    clean(tmp_path)
    assert not [path for path in runs.iterdir() if path.is_dir()]
