"""Peers as Ray actors on a cluster of three nodes, which are processes of this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 2}  # read at import
import ray
from ray.cluster_utils import Cluster

from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from parts.carrier import ray_actors, requests
from parts.carrier.requests import AnswerHeader, PeerRequest, RequestHeader, decode, encode
from parts.carrier.tables import RayCluster
from tests import tiny
from tests.errors import refused
from tests.parts.carrier.test_remote_peers import never_twice

pytestmark = pytest.mark.long

STORE = 80 * 2**20  # bytes of each node's object store
QUICK = {  # a node that is gone is noticed within seconds
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE}
    made = Cluster(initialize_head=True, head_node_args=head | {"_system_config": QUICK})
    for _ in range(3):
        made.add_node(num_cpus=1, object_store_memory=STORE)
    yield made
    ray.shutdown()
    made.shutdown()


class Scripted(ray_actors.PeerActor):
    """An actor that repeats what `recompute` has, and answers others as HOW says."""

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def answer(self, buffers: list[np.ndarray]) -> list[np.ndarray]:
        header, arrays = decode(RequestHeader, [memoryview(one) for one in buffers])
        done = AnswerHeader(number=header.number, process=self.process.name, values=header.values)
        how = HOW.get(header.operation, "")
        if how == "nonsense":
            return [np.frombuffer(b"\x80\x04pickle", np.uint8)]
        if how == "silence":
            time.sleep(60)
        if how == "failure":
            done = done.model_copy(update={"error": "out of memory"})
        if how == "another":
            done = done.model_copy(update={"process": "0" * 16})
        if how == "death":
            os._exit(1)
        return ray_actors._arrays(encode(done, arrays))


HOW = {
    "restore": "silence",
    "forward": "failure",
    "exit": "nonsense",
    "align": "another",
    "compile": "death",
}
LOST = {
    requests.Restore(): "no answer to restore within 0.5 s",
    requests.Forward(): "out of memory",
    requests.Exit(): "FrameError: ",
    requests.Align(step=1, hash=False): "its process was started again",
    requests.Compile(imprecise=False): "Actor",
}


def test_what_actors_do_is_what_processes_do(cluster, monkeypatch):
    monkeypatch.setattr(ray_actors, "PeerActor", Scripted)
    path = os.pathsep.join([str(tiny.PROJECT), os.environ.get("PYTHONPATH", "")])
    settings = RayCluster(address=cluster.address, cpus=0.1, strategy="STRICT_SPREAD")
    carrier = ray_actors.start(2, settings, environment={"PYTHONPATH": path}, backend="cpu")
    try:
        both, big = frozenset({0, 1}), np.arange(2**20, dtype=np.float32).reshape(-1, 2)
        assert carrier.wait(both, 600) == both  # it ends when they are there
        nodes = {ray.get(actor.handle.node.remote()) for actor in carrier._of.values()}
        assert len(nodes) == 2  # each on a node of its own
        echo = requests.Recompute(step=1, count=7)
        one = PeerRequest(echo, [big, np.array(1.5, "bfloat16")])
        answers = carrier.ask({0: one, 1: one}, 60)
        assert answers.keys() == both and carrier.lost() == {}
        for answer in answers.values():
            assert answer.header.values == echo.model_dump()
            assert [a.tobytes() for a in answer.arrays] == [a.tobytes() for a in one.arrays]
        for values, why in LOST.items():
            silent = values == requests.Restore()
            asked = {0: PeerRequest(values), 1: one}
            assert carrier.ask(asked, 0.5 if silent else 60).keys() == {1}
            (line,) = carrier.lost().values()
            assert line.startswith(why) and "\n" not in line
            if silent:
                ray.kill(carrier._of[0].handle, no_restart=False)  # rather than wait a minute
            assert carrier.wait(frozenset({0}), 60) == {0}, why  # it is there again
    finally:
        carrier.close()


ROOMS = (  # for so many peers, by changes to what each reserves; None for enough
    (3, {}, None),
    (4, {}, 3),
    (7, {"cpus": 0.5}, 6),
    (4, {"cpus": 0.1, "strategy": "STRICT_SPREAD"}, 3),
    (2, {"strategy": "STRICT_PACK"}, 1),
    (1, {"gpus": 1}, 0),
    (1, {"memory_gb": 1e6}, 0),
    (99, {"cpus": 0}, None),
)


def test_a_cluster_without_room_for_all_peers_is_one_line_at_once(cluster):
    ray_actors.connect(RayCluster(address=cluster.address))
    try:
        for count, changes, room in ROOMS:
            line = ray_actors.shortage(count, RayCluster(address=cluster.address, **changes))
            assert (line is None) == (room is None), changes
            if line:
                assert f"room for {room} of {count} peers" in line and "[runtime.ray]" in line
    finally:
        ray.shutdown()


WAIT_FOR_RAY = """
import sys, time
from pipeline.stage import signals
signals.end_on_request()
from parts.carrier import ray_actors
from parts.carrier.tables import RayCluster
ray_actors.connect(RayCluster(address=sys.argv[1]))
print("connected", flush=True)
time.sleep(60)
"""


def test_a_request_to_stop_is_obeyed_in_one_line_also_under_ray(cluster):
    command = [sys.executable, "-c", WAIT_FOR_RAY, cluster.address]
    with subprocess.Popen(
        command, cwd=tiny.PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout.readline() == "connected\n"
        waiting.send_signal(signal.SIGTERM)
        _, said = waiting.communicate(timeout=30)
    assert waiting.returncode == 128 + signal.SIGTERM
    assert said.strip() == "error: SIGTERM received; the same command goes on"


def settings(cluster: Cluster, folder, carrier: str, **changes: object) -> dict:
    document = tiny.run_document(
        tiny.write_data(folder / "tokens"),
        config__witness_nodes=0,
        **tiny.SHORT_EPOCHS,
        peers__count=3,
        runtime__carrier=carrier,
        runtime__ray={"address": cluster.address},
        runtime__checkpoint_every=50,
        **changes,
    )
    tiny.write_run(folder / "run.toml", document)
    return folder / "run.toml"


def test_a_cluster_that_loses_a_node_and_gains_one_finishes_and_its_audit_accepts(
    cluster, tmp_path
):
    run_file = settings(cluster, tmp_path, "ray", config__total_steps=60)
    root = tmp_path / "root"

    def rounds() -> int:
        files = (root / "data/runs").glob("*/transcript/rounds.jsonl")
        return sum(file.read_bytes().count(b"\n") for file in files)

    def trouble() -> None:
        while rounds() < 8:
            time.sleep(0.02)
        node = next(n for n in cluster.worker_nodes)
        cluster.remove_node(node, allow_graceful=False)
        while rounds() < 16:
            time.sleep(0.02)
        with mock.patch.object(signal, "signal"):  # which only a main thread may call
            cluster.add_node(num_cpus=1, object_store_memory=STORE)

    thread = threading.Thread(target=trouble, daemon=True)
    thread.start()
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    thread.join(60)
    transcript = Transcript(root / "data/trained/transcript")
    never_twice(transcript)
    assert len(transcript.rounds) == 60
    assert len({peer for entry in transcript.rounds for peer in entry.evidence.silent}) == 1
    assert read_json(root / "data/verdict/verdict.json")["accepted"]


def test_a_cluster_that_lets_anybody_in_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with refused("RAY_AUTH_MODE", "'disabled'", "'token'"):
        ray_actors.start(1, RayCluster(), environment={}, backend="cpu")
