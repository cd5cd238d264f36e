"""A worker that behaves: gradients in shared arrays, its environment, its end."""

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from parts.workload.process import worker_process
from parts.workload.process.shared_arrays import SharedArrays
from tests.errors import refused
from tests.parts.workload import fake_workers
from tests.parts.workload.fake_workers import gone, start

SAYS_ENVIRONMENT = """
def answer(sock, request):
    reply(sock, request, {"env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv})
serve(answer)
"""


def test_arrays_are_in_the_folder_where_memory_has_no_room_for_them(tmp_path, monkeypatch):
    reserve = os.posix_fallocate

    def full(descriptor, offset, size):
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{tmp_path}/"):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    arrays = SharedArrays(tmp_path, 3)
    assert Path(arrays.request()["path"]).parent == tmp_path
    arrays.params[:] = [1, 2, 3]
    arrays.forget()
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: full(0, 0, 0))
    with refused(tmp_path, "No space left on device"):
        SharedArrays(tmp_path, 3)


def test_a_worker_cannot_cut_arrays_in_memory_short(tmp_path):
    """Whoever reads a mapped file that its other end cut short is ended by SIGBUS."""
    arrays = SharedArrays(tmp_path, 3)
    with open(arrays.request()["path"], "r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)
    arrays.forget()
    assert not [*tmp_path.iterdir()]
    assert arrays.params.tolist() == [0, 0, 0]


def test_worker_gets_its_folder_its_arguments_and_no_secret_of_ours(tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "GOOGLE_APPLICATION_X"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("NVIDIA_API_KEY", "hidden")  # begins as what is given
    monkeypatch.setenv("LOCKSTEP_X", "hidden")
    monkeypatch.setenv("PYTHONPATH", "/hidden")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with closing(start(tmp_path, SAYS_ENVIRONMENT, env={"MINE": "1"})) as worker:
        said = worker.call("say", {})
    assert worker.group.ended() == "exited with status 0"  # it was asked, not killed
    given = said["env"]
    assert not [name for name, value in given.items() if "hidden" in value]
    assert given["MINE"] == "1"
    assert given["OMP_NUM_THREADS"] == "3"
    assert given["PYTHONHASHSEED"] == "0"
    *ours, others = given["PYTHONPATH"].split(os.pathsep)
    assert [Path(place).name for place in ours] == ["python"] * len(worker_process.PYTHON)
    assert others == str(tmp_path / "code")
    assert said["cwd"] == str(tmp_path / "worker")
    assert json.loads(said["argv"][4]) == {"width": 3}
    assert not (tmp_path / "code" / "__pycache__").exists()


def test_worker_and_its_children_end_with_us_even_if_we_are_killed(tmp_path):
    busy = """
    import subprocess
    child = subprocess.Popen(["sleep", "30"])
    def answer(sock, request):
        print(os.getpid(), child.pid, flush=True)
        time.sleep(30)
    serve(answer)
    """
    fake_workers.command(tmp_path, busy)
    ours = (
        "import sys; sys.path[:0] = sys.argv[1:3]\n"
        "from pathlib import Path\n"
        "from parts.workload.process.worker_process import WorkerCommand, WorkerProcess\n"
        "here = Path(sys.argv[3])\n"
        "command = WorkerCommand(sys.executable, 'fake', 'a:b', {}, (here,), {}, 30.0, 30.0)\n"
        "WorkerProcess.start(command, here / 'own').call('busy', {})\n"
    )
    root = Path(__file__).parents[3]
    process = subprocess.Popen([sys.executable, "-c", ours, root, Path(__file__).parent, tmp_path])
    log = tmp_path / "own" / "worker.log"
    until = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")) and time.monotonic() < until:
        time.sleep(0.02)
    pids = [int(word) for word in log.read_text().split()]
    process.kill()
    process.wait()
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    until = time.monotonic() + 10
    while log.parent.exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not log.parent.exists() and tmp_path.exists()  # its folder, and no other
