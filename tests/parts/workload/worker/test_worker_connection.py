"""The connection: what is answered, and what ends a worker."""

import struct
import sys

import pytest

from parts.workload.process.messages import WorkerError
from parts.workload.python.lockstep_worker import frames
from tests.errors import refused
from tests.parts.workload.worker_host import Host

NO_JSON = f"""#!/bin/sh
exec {sys.executable} "$@" --config-json {{
"""


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("plain:broken", r"RuntimeError: two lines \(plain.py:\d+, in broken\); more in "),
        ("plain:missing", "AttributeError: module 'plain' has no attribute 'missing'"),
        ("plain", "ValueError: factory 'plain'; module:attr expected"),
        ("plain:Plain", "JSONDecodeError: "),
    ],
)
def test_a_factory_that_fails_is_the_answer_to_hello(folder, factory, expected, tmp_path):
    python = sys.executable
    if "JSON" in expected:  # another host's config
        (launcher := tmp_path / "python").write_text(NO_JSON)
        launcher.chmod(0o755)
        python = str(launcher)
    with pytest.raises(WorkerError, match=f"^workload {factory}: hello: {expected}"):
        Host(factory, {}, folder, python=python)


def test_an_unknown_method_and_a_request_that_is_none_are_answered(host):
    with refused("unknown method 'fly'"):
        host.ask("fly")
    host.connection.sendall(frames.packed([1]))
    answer = frames.receive(host.connection)
    assert not answer["ok"] and "unknown method None" in answer["error"]
    assert host.ask("hello")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (struct.pack(">Q", 1 << 40), "worker: a message of 1099511627776 bytes, expected"),
        (struct.pack(">Q", 1) + b"{", "worker: Expecting property name"),
    ],
)
def test_a_frame_too_long_or_no_json_ends_the_worker_in_one_line(folder, data, expected):
    with Host("plain:Plain", {}, folder) as host:
        host.connection.sendall(data)
        assert host.group.child.wait(20) == 1
    said = host.group.log.path.read_text()
    assert said.startswith(expected) and said.count("\n") == 1


def test_a_worker_whose_host_goes_ends(folder):
    with Host("plain:Plain", {}, folder) as host:
        host.connection.close()
        assert host.group.child.wait(20) == 0


def test_a_worker_whose_host_goes_while_it_computes_ends_too(folder):
    with Host("plain:Hanging", {}, folder) as host:
        model_id = host.ask("init_model", device="cpu")["model_id"]
        given = {"model_id": model_id, "batches": []}
        host.connection.sendall(frames.packed({"id": 9, "method": "train_window", "params": given}))
        host.connection.close()
        assert host.group.child.wait(20) in (0, 1)
