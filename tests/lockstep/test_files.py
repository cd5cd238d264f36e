"""A file is complete or absent after any write, and only what it should be is read."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.errors import LockstepError
from lockstep.files import check_regular_file, read_bytes, read_json, write_json, write_text
from tests.errors import refused


def test_a_failed_write_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch):
    file = tmp_path / "metrics.json"
    write_json(file, {"loss": 1.0})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with refused("metrics.json", "No space left on device"):
        write_json(file, {"loss": 2.0})
    assert read_json(file) == {"loss": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]


def test_what_a_kill_left_of_a_write_is_taken_over_by_the_next(tmp_path):
    (tmp_path / ".a.json.part").write_text("much longer than what is written now")
    write_text(tmp_path / "a.json", "{}")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.json", "{}")]


def test_two_writers_of_one_file_take_turns(tmp_path):
    file, texts = tmp_path / "a.txt", [f"{letter}" * 10**5 for letter in "abcdefgh"]
    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(lambda text: write_text(file, text), texts))
    assert file.read_text() in texts
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_json_without_a_finite_number_is_not_written(tmp_path):
    with pytest.raises(ValueError):
        write_json(tmp_path / "a.json", {"loss": float("nan")})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1]",
        '{"a": 1, "a": 2}',
        '{"a": [NaN]}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        f'{{"a": {10**400}}}',
        "[" * 10**5,
        json.dumps(dict.fromkeys(range(10**5), 0))[:-1] + ', "99999": 0}',  # in a moment
    ],
)
def test_a_broken_json_file_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with refused("a.json"):
        read_json(tmp_path / "a.json")


def test_a_file_to_read_is_regular_and_of_a_bounded_size(tmp_path):
    (tmp_path / "a").write_text("theirs")
    (tmp_path / "link").symlink_to("a")
    for name in ("a", "link"):
        check_regular_file(tmp_path / name, most=6)
        assert read_bytes(tmp_path / name, 6) == b"theirs"
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "nothing").symlink_to("not there")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "endless", ".", "nothing", "loop"):
        with refused(tmp_path / name):
            check_regular_file(tmp_path / name)
        with pytest.raises((LockstepError, OSError)):
            read_bytes(tmp_path / name, 6)
    for read in (lambda path: check_regular_file(path, most=5), lambda path: read_bytes(path, 5)):
        with refused(tmp_path / "a", 5):
            read(tmp_path / "a")
