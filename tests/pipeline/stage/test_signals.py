"""A request to stop ends a process at once; a trainer saves first; a killed engine leaves none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.stage import signals
from tests import tiny

# ---- A request to stop ends a process at once, wherever it is; a trainer saves first ----

# Where JAX runs Python code of its own, and an exception would be printed and forgotten.
IN_A_CALLBACK = """
import gc, os, signal
from pipeline.stage import signals
signal.signal(signal.SIGINT, signal.{ctrl_c})  # a job in the background begins with SIG_IGN
signals.end_on_request()
gc.callbacks.append(lambda *_: os.kill(os.getpid(), signal.{name}))
gc.collect()
print("went on")
"""


def run(name: str, ctrl_c: str) -> subprocess.CompletedProcess:
    return tiny.python("-c", IN_A_CALLBACK.format(name=name, ctrl_c=ctrl_c))


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_request_to_stop_is_obeyed_inside_of_a_callback(name, status):
    done = run(name, ctrl_c="default_int_handler")
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == f"\nerror: {name} received; the same command goes on\n"


def test_ctrl_c_that_a_job_in_the_background_ignores_stays_ignored():
    done = run("SIGINT", ctrl_c="SIG_IGN")
    assert (done.returncode, done.stdout) == (0, "went on\n")


AT_THE_END = """
import os, signal, sys
from pipeline.stage import signals
signals.end_on_request()
class Last:
    def __del__(self, kill=os.kill, me=os.getpid()):
        kill(me, signal.SIGINT)
sys.last = Last()
"""


def test_ctrl_c_in_the_interpreters_last_moments_does_not_end_what_is_done_without_a_word():
    assert tiny.python("-c", AT_THE_END).returncode == 0


def test_a_trainer_in_the_background_ignores_ctrl_c_while_it_trains_too():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with signals.stopping() as asked_to_stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert asked_to_stop() == 0
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked_to_stop() == 143
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Python runs a file of this name at its start; typer is among the first that the command imports.
AS_IT_IMPORTS = """
import signal, sys
class Interrupted:
    def find_spec(name, *_):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupted)
"""


@pytest.mark.parametrize("module", ["pipeline", "lockstep"])
def test_ctrl_c_while_a_command_is_still_importing_is_obeyed_in_one_line(tmp_path, module):
    (tmp_path / "sitecustomize.py").write_text(AS_IT_IMPORTS)
    done = tiny.python("-m", module, "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 130
    assert done.stderr == "\nerror: SIGINT received; the same command goes on\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_trainer_learns_the_status_to_end_with_and_ends_at_the_second_request(
    monkeypatch, number, status
):
    before = signal.getsignal(number)
    with signals.stopping() as asked_to_stop:
        assert asked_to_stop() == 0
        os.kill(os.getpid(), number)
        assert asked_to_stop() == status
        ended = []
        monkeypatch.setattr(os, "_exit", ended.append)
        os.kill(os.getpid(), number)
        assert ended == [status]
    assert signal.getsignal(number) == before


def test_a_trainer_that_only_waits_obeys_the_first_request(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with signals.stopping(), signals.at_once():
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [143]
    ended.clear()
    with signals.stopping():
        os.kill(os.getpid(), signal.SIGTERM)  # saved at the end of a round, and then it waits
        assert not ended
        with signals.at_once():
            assert ended == [143]


# ---- No orphan: a stage ends when the engine above it is killed; started by hand, it stays ----

STAGE = """
import sys, time
from pathlib import Path
from pipeline.stage import signals
with signals.stopping() as asked_to_stop:
    signals.watch_engine(poll_seconds=0.05)
    Path(sys.argv[1]).touch()
    end = time.monotonic() + 60  # no test leaves it behind for longer
    while not asked_to_stop() and time.monotonic() < end:
        time.sleep(0.05)
    Path(sys.argv[1]).unlink()
    time.sleep(2)  # it saves
    Path(sys.argv[1]).with_name("saved").touch()
"""


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def start(tmp_path: Path, engine: str, *arguments: str) -> tuple[subprocess.Popen, Path]:
    """A stage below a shell below a process of this name, with these arguments."""
    program = tmp_path / engine
    program.symlink_to("/bin/sh")
    inner = f'{sys.executable} -c "$STAGE" {tmp_path}/ready & echo $! > {tmp_path}/pid; wait'
    process = subprocess.Popen(
        [program, "-s", *arguments], env=os.environ | {"STAGE": STAGE}, stdin=subprocess.PIPE
    )
    process.stdin.write(f"/bin/sh -c '{inner}'; true\n".encode())
    process.stdin.close()
    assert wait_until((tmp_path / "ready").exists)
    return process, Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}")


def is_running(process: Path) -> bool:
    try:
        return " Z " not in (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone, before or while it was read
        return False


@pytest.mark.parametrize("name", ["snakemake", "lockstep"])  # `lockstep compare` starts stages
def test_a_stage_ends_when_its_engine_is_killed(tmp_path, name):
    engine, stage = start(tmp_path, name)
    assert is_running(stage)
    engine.kill()
    engine.wait()
    assert wait_until(lambda: not is_running(stage))


def test_a_stage_that_was_asked_to_stop_saves_though_its_engine_is_gone(tmp_path):
    engine, stage = start(tmp_path, "snakemake")
    os.kill(int(stage.name), signal.SIGTERM)
    assert wait_until(lambda: not (tmp_path / "ready").exists())
    engine.kill()
    engine.wait()
    assert wait_until(lambda: not is_running(stage))
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("arguments", [(), ("lockstep",)])  # as of `screen -S lockstep`
def test_a_stage_started_by_hand_outlives_its_shell(tmp_path, arguments):
    shell, stage = start(tmp_path, "some_shell", *arguments)
    shell.kill()
    shell.wait()
    time.sleep(0.5)
    assert is_running(stage) and (tmp_path / "ready").exists()  # nobody asked it to stop
    os.kill(int(stage.name), signal.SIGKILL)
