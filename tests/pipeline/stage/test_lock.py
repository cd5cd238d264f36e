"""What a stage holds of the machine: its lock, and open files."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from pipeline.stage import descriptors, lock
from tests.errors import refused

# ---- A stage's lock: one holder, whose process id the next one reads; free as soon as it dies ----

HOLD = """
import sys, time
from pathlib import Path
from pipeline.stage import lock
with lock.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_held_lock_names_its_holder(tmp_path, holder):
    with (
        refused(tmp_path / "lock", holder.pid, os.uname().nodename),
        lock.hold(tmp_path / "lock", 0.2),
    ):
        pass
    assert lock.holder(tmp_path / "lock") == holder.pid


def test_who_waits_for_a_lock_says_for_whom(tmp_path, holder, caplog, monkeypatch):
    monkeypatch.setattr(lock, "SILENT_SECONDS", 0.1)
    with refused(tmp_path / "lock"), lock.hold(tmp_path / "lock", 0.5):
        pass
    (said,) = caplog.messages
    assert str(holder.pid) in said and "0.5 s" in said


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with refused(tmp_path / "lock", "flock"), lock.hold(tmp_path / "lock"):
        pass


# ---- How many files a process may open ----

NO_END = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("given", "left"),
    [((1024, 524288), 65536), ((64, 4096), 4096), ((256, NO_END), 65536), ((2**20, 2**20), 2**20)],
)
def test_the_limit_is_raised_as_far_as_it_may(monkeypatch, given, left):
    limits = {"now": given}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, to: limits.update(now=to))
    descriptors.check()
    assert limits["now"] == (left, given[1])


@pytest.mark.parametrize("given", [(32, 32), (32, NO_END)])
def test_a_limit_that_is_too_low_and_cannot_be_raised_is_refused_in_one_line(monkeypatch, given):
    def refuse(kind: int, to: tuple) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: given)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with refused("ulimit -n", 32, descriptors.LEAST_FILES):
        descriptors.check()
