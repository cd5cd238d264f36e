"""A stage's lock: one holder, whose process id the next one reads; free as soon as it dies."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from pipeline.stage import lock
from tests.errors import refused

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


def test_a_killed_holder_frees_the_lock(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    with lock.hold(tmp_path / "lock", 5):
        assert (tmp_path / "lock").read_text().split()[0] == str(os.getpid())


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with refused(tmp_path / "lock", "flock"), lock.hold(tmp_path / "lock"):
        pass
