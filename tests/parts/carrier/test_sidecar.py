"""The process of one peer, without what it computes: whom it connects to, and when it ends."""

import os
import signal
import socket
import threading
import time

import pytest

from parts.carrier import sidecar
from parts.carrier.channel import Line, PeerSecret, Secrets, endpoint
from parts.carrier.handlers import tables_for_a_process
from parts.carrier.remote_peers import gpus_of
from parts.carrier.sidecar import PeerProcess
from pipeline import runfile
from tests import tiny
from tests.errors import refused


@pytest.fixture
def line(tmp_path, monkeypatch):
    """To a port where nobody is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr("parts.carrier.channel.RECONNECT_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(sidecar, "LOOK_SECONDS", 0.05)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    line = Line(f"tcp://127.0.0.1:{port}", PeerSecret.read(Secrets(tmp_path, 1).path(0)))
    yield line
    line.close()
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("address", ["host:5555", "tcp://host:5555"])
def test_an_address_is_the_same_with_and_without_its_scheme(address):
    assert endpoint(address) == "tcp://host:5555"


@pytest.mark.parametrize(
    "address", ["host", "host:", ":5555", "host:0", "host:99999", "http://host:1", "tcp://h:1/", ""]
)
def test_an_address_that_is_none_is_refused_in_one_line(tmp_path, address):
    with refused(address, "HOST:PORT"):
        sidecar.main(address, Secrets(tmp_path, 1).path(0))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"peer": 9}, ["--peer 9", "peer 0"]),
        ({"world_size": 2}, ["--world-size 2", 1]),
        ({"rank": 1}, ["--rank 1", "--world-size 1"]),
        ({"backend": "tpu"}, ["--backend tpu", "cuda"]),
    ],
)
def test_what_is_not_of_the_peers_secret_is_refused_in_one_line(tmp_path, given, named):
    with refused(*named):
        sidecar.main("127.0.0.1:1", Secrets(tmp_path, 1).path(0), **given)


def test_a_process_without_a_trainer_says_so_and_ends_after_its_wait(line, capsys):
    with refused(line.address, "no trainer there", "0.2 s"):
        sidecar.serve(PeerProcess(0), line, wait_seconds=0.2)
    said = capsys.readouterr().out
    assert said in ("", f"{line.address}: no trainer there; trying again, for 0.2 s\n")


def test_who_ends_every_handshake_is_no_trainer_of_this_run(line, capsys):
    port = int(line.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)) as server:

        def turn_away() -> None:
            while line.turned_away < sidecar.TURNED_AWAY:
                server.accept()[0].close()

        threading.Thread(target=turn_away, daemon=True).start()
        until = time.monotonic() + 60
        while line.turned_away < sidecar.TURNED_AWAY and time.monotonic() < until:
            line.receive(0.01)
    sidecar._TrainerWatch(line, 60).look()
    assert "another run's trainer, or no trainer; trying again" in capsys.readouterr().out


def test_sigterm_ends_a_process_that_has_no_trainer(line):
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    sidecar.serve(PeerProcess(0), line)


@pytest.mark.soak
def test_sigint_ends_a_process_that_is_busy_in_foreign_code():
    busy = (
        "import ctypes, os, signal; from parts.carrier import sidecar; sidecar.end_by_signals();"
        "signal.signal(signal.SIGINT, lambda *_: None); os.kill(os.getpid(), signal.SIGINT);"
        "[ctypes.CDLL(None).sleep(9) for _ in range(9)]"
    )
    assert tiny.python("-c", busy).returncode == 128 + signal.SIGINT


# ---- Peers' processes share a host's GPUs ----


@pytest.mark.parametrize(
    ("peers", "there", "parts", "seen"),
    [
        (4, 4, 1, ["0", "1", "2", "3"]),
        (4, 2, 1, ["0", "1", "0", "1"]),
        (2, 5, 2, ["0,1", "2,3"]),
        (3, 1, 1, ["0", "0", "0"]),
    ],
)
def test_peers_are_spread_over_the_gpus(peers, there, parts, seen):
    assert [gpus_of(peer, there, parts) for peer in range(peers)] == seen


def test_gpus_that_the_user_named_are_the_ones(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert gpus_of(1, 2, 1) == "7"


# ---- Whose run it is ----

WORKLOAD = {"factory": "torch_classifier:Classifier", "config": {"hidden": 8}}
COMMAND = WORKLOAD | {"inner": "command", "command": ["touch", "CANARY"]}


def with_workload(workload):
    """What a run file with such a workload has otherwise."""
    changes = {"workload": workload, "model__LLM__architecture": "HfAuto"}
    changes["model__LLM__checkpoint"] = "Ephemeral"
    if "inner" in workload:
        optimizer = {"DiLoCo": tiny.DILOCO["DiLoCo"] | {"inner": "Workload"}}
        changes["model__LLM__optimizer"] = optimizer
    return changes


def tables(**changes):
    """What a trainer sends of a run, which says how its worker is started."""
    theirs = {"carrier": "processes", "worker_python": "/tmp/theirs", "worker_env": {"A": "1"}}
    return tables_for_a_process(tiny.parsed(runtime=theirs, **changes))


def test_a_process_started_by_hand_takes_no_settings_of_its_machine_from_a_trainer():
    run = sidecar._of_others(None, tables())
    assert run.runtime == runfile.Runtime(carrier="processes")
    assert sidecar._own(tables()).runtime.worker_python == "/tmp/theirs"  # a child of the trainer


@pytest.mark.parametrize("workload", [WORKLOAD, COMMAND])
def test_a_process_started_by_hand_runs_no_workload_of_a_trainer(workload):
    with refused("workload.factory", "--run"):
        sidecar._of_others(None, tables(**with_workload(workload)))


@pytest.mark.parametrize("workload", [WORKLOAD, COMMAND])
def test_a_process_started_by_hand_runs_the_workload_of_its_own_run_file(tmp_path, workload):
    own, mine = tmp_path / "run.toml", {"carrier": "processes", "worker_python": "/usr/bin/mine"}
    tiny.write_run(own, tiny.run_document("nowhere", runtime=mine, **with_workload(workload)))
    run = sidecar._of_others(own, tables(**with_workload(workload)))
    assert run.runtime.worker_python == "/usr/bin/mine" and run.runtime.worker_env == {}
    other = workload | {"config": {"hidden": 9}}
    with refused("workload.factory", "--run"):
        sidecar._of_others(own, tables(**with_workload(other)))
