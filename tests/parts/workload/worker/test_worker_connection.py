"""The connection: what is waited for, and what ends a worker."""

import struct

import pytest

from tests.parts.workload.worker_host import Host, WorkerError


def test_a_factory_that_takes_long_is_waited_for(folder):
    """burn_p2p's hosts give a worker 10 s to connect, and any time to answer."""
    with Host("plain:slow", {}, folder) as host:
        assert host.ask("hello")["workload_name"] == "a plain one"


@pytest.mark.parametrize(
    "factory, config, expected",
    [
        ("plain:broken", "{}", r"RuntimeError: two lines \(plain.py:\d+, in broken\)\nTraceback"),
        ("plain:missing", "{}", "AttributeError: module 'plain' has no attribute 'missing'\n"),
        ("plain", "{}", "ValueError: factory 'plain'; module:attr expected\n"),
        ("plain:Plain", "{", "JSONDecodeError: "),
    ],
)
def test_a_factory_that_fails_is_the_answer_to_hello(folder, factory, config, expected):
    with Host(factory, config, folder) as host:
        for _ in range(2):
            with pytest.raises(WorkerError, match=f"^{expected}"):
                host.ask("hello")
        assert host.ask("shutdown") == {"ok": True}
        assert host.process.wait(20) == 0


def test_an_unknown_method_and_a_request_that_is_none_are_answered(host):
    with pytest.raises(WorkerError, match="unknown method 'fly'"):
        host.ask("fly")
    host.send([1])
    answer = host.receive()
    assert not answer["ok"] and "unknown method None" in answer["error"]
    assert host.ask("hello")


@pytest.mark.parametrize(
    "data, expected",
    [
        (struct.pack(">Q", 1 << 40), b"worker: a message of 1099511627776 bytes, expected"),
        (struct.pack(">Q", 1) + b"{", b"worker: Expecting property name"),
    ],
)
def test_a_frame_too_long_or_no_json_ends_the_worker_in_one_line(folder, data, expected):
    with Host("plain:Plain", {}, folder) as host:
        host.sock.sendall(data)
        _, errors = host.process.communicate(timeout=20)
        assert errors.startswith(expected) and errors.count(b"\n") == 1


def test_a_worker_whose_host_goes_ends(folder):
    with Host("plain:Plain", {}, folder) as host:
        host.ask("hello")
        host.sock.close()
        assert host.process.wait(20) == 0


def test_a_worker_whose_host_goes_while_it_computes_ends_too(folder):
    with Host("plain:Hanging", {}, folder) as host:
        model_id = host.ask("init_model", device="cpu")["model_id"]
        given = {"model_id": model_id, "batches": []}
        host.send({"id": 9, "method": "train_window", "params": given})
        host.sock.close()
        assert host.process.wait(20) in (0, 1)
