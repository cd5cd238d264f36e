"""Stores of fsspec, whose libraries set no limits: theirs are ours."""

from threading import Event

import fsspec
import pytest

from pipeline.net import fsspec_files
from pipeline.net.limits import TransientError
from pipeline.net.origin import Origin
from pipeline.runfile import Network
from tests.errors import refused

SOON = Network(attempts=2, stall_seconds=0.05)
PATIENT = Network(attempts=2, stall_seconds=60.0)


@pytest.fixture
def memory(monkeypatch):
    """A file in fsspec's file system in memory, which names versions."""
    files = fsspec.filesystem("memory", skip_instance_cache=True)
    files.pipe("/d/a.ds", bytes(range(256)) * 2**10)
    monkeypatch.setattr(fsspec_files, "file_system", lambda _: files)
    monkeypatch.setattr(fsspec_files, "_lengths", {})
    yield files
    files.rm("/d", recursive=True)


def origin_of(memory) -> Origin:
    size, tag = fsspec_files.version(memory.info("/d/a.ds"))
    return Origin(url="memory://d/a.ds", size=size, tag=tag)


def test_a_library_that_never_answers_is_left(memory, monkeypatch):
    origin, over = origin_of(memory), Event()
    for method in ("ls", "cat_file"):
        monkeypatch.setattr(memory, method, lambda *_, **__: over.wait())
    with refused(0.1):
        fsspec_files.list_files("memory://d", SOON)
    with pytest.raises(TransientError, match="timed out"):
        next(fsspec_files.read(origin, 0, 9, SOON, is_rest=False))
    over.set()


def test_of_a_slow_store_less_is_asked_at_once_until_it_comes_in_time(memory, monkeypatch):
    origin, asked = origin_of(memory), []
    cat = memory.cat_file

    def slow(path: str, start: int, end: int) -> bytes:
        asked.append(end - start)
        if end - start > 2**16:
            raise TimeoutError
        return cat(path, start=start, end=end)

    monkeypatch.setattr(memory, "cat_file", slow)
    pieces = []
    for _ in range(9):
        try:
            got = sum(map(len, pieces))
            for piece in fsspec_files.read(origin, got, 2**18, PATIENT, is_rest=got > 0):
                pieces.append(piece)
        except TransientError:
            continue
        break
    assert b"".join(pieces) == bytes(range(256)) * 2**10
    assert min(asked) == 2**16


def test_a_listing_in_which_folders_have_no_end_is_refused(memory, monkeypatch):
    def below(folder: str, **_: object) -> list[dict]:
        return [{"name": f"{folder}/d", "type": "directory", "size": 0}]

    monkeypatch.setattr(memory, "ls", below)
    monkeypatch.setattr(fsspec_files.limits, "LISTING_PAGES", 9)
    with refused("memory://d", 9):
        fsspec_files.list_files("memory://d", PATIENT)
