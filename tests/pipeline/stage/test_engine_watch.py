"""No orphan: a stage ends when the engine above it is killed; started by hand, it stays."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline.stage import signals

STAGE = """
import sys, time
from pathlib import Path
from pipeline.stage import signals
signals.watch_engine(poll_seconds=0.05)
Path(sys.argv[1]).touch()
time.sleep(60)
"""


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def start(tmp_path: Path, engine: str) -> tuple[subprocess.Popen, Path]:
    """A stage below a shell below a process of this name."""
    program = tmp_path / engine
    program.symlink_to("/bin/sh")
    inner = f'{sys.executable} -c "$STAGE" {tmp_path}/ready & echo $! > {tmp_path}/pid; wait'
    process = subprocess.Popen(
        [program, "-c", f"/bin/sh -c '{inner}'; true"], env=os.environ | {"STAGE": STAGE}
    )
    assert wait_until((tmp_path / "ready").exists)
    return process, Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")


def is_running(process: Path) -> bool:
    return process.exists() and " Z " not in (process / "stat").read_text()


def test_a_stage_ends_when_its_engine_is_killed(tmp_path):
    engine, stage = start(tmp_path, "snakemake")
    assert is_running(stage)
    engine.kill()
    engine.wait()
    assert wait_until(lambda: not is_running(stage))


def test_a_stage_started_by_hand_outlives_its_shell(tmp_path):
    shell, stage = start(tmp_path, "some_shell")
    shell.kill()
    shell.wait()
    time.sleep(0.5)
    assert is_running(stage)
    os.kill(int(stage.name), signal.SIGKILL)


def test_a_signal_to_stop_is_recorded_and_does_not_end_the_process():
    with signals.stopping() as is_stopping:
        assert not is_stopping()
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_until(is_stopping)
