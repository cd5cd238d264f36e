"""What every carrier does with what peers do: one list of behaviours, over real connections."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pipeline.carrier import processes
from pipeline.carrier.carrier import Asked
from pipeline.carrier.channel import Line, Secret
from pipeline.carrier.frames import AnswerHeader, RequestHeader, decode, encode
from pipeline.errors import LockstepError

GIB = 2**30
NAMES = ["0" * 15 + digit for digit in "0123"]  # of processes


class Script:
    """A peer's process whose answers are written by a test.

    reply: (process, request, arrays) -> what is sent, each a list of buffers.
    """

    def __init__(self, carrier, secret: Secret, peer: int, reply: Callable, name: str = NAMES[0]):
        self.line = Line(carrier.hub.address, secret, b"peer-%d.0" % peer, 2 * GIB)
        self.reply, self.name, self.stopped = reply, name, threading.Event()
        self.line.send(encode(AnswerHeader(process=name, says="hello")))
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while not self.stopped.is_set():
            buffers = self.line.receive(0.01)
            if buffers is not None:
                request, arrays = decode(RequestHeader, buffers)
                for sent in self.reply(self.name, request, arrays):
                    self.line.send(sent)
        self.line.close()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


def echo(name: str, request: RequestHeader, arrays: list) -> list:
    return [
        encode(AnswerHeader(number=request.number, process=name, values=request.values), arrays)
    ]


@contextmanager
def carrying(folder, *replies: Callable, frame_bytes: int = 2**20) -> Iterator[tuple]:
    """A carrier, and the scripts of its peers."""
    carrier = processes.start(
        folder,
        (),
        listen="tcp://127.0.0.1:0",
        frame_bytes=frame_bytes,
        environment={},
        environment_of=lambda peer: {},
        backend="cpu",
    )
    secret = Secret.read(folder / processes.SECRET)
    scripts = [Script(carrier, secret, peer, reply) for peer, reply in enumerate(replies)]
    try:
        peers = frozenset(range(len(replies)))
        assert carrier.wait(peers, 10) == peers
        yield carrier, scripts
    finally:
        for script in scripts:
            script.stop()
        carrier.close()


def asked(value: int, *arrays: np.ndarray) -> Asked:
    return Asked("train", {"value": value}, arrays)


def test_each_peer_gets_its_own_request_and_arrays_travel_unchanged(tmp_path):
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        np.zeros((0, 4), np.int32),
        np.array(1.5, "bfloat16"),
    ]
    with carrying(tmp_path, echo, echo) as (carrier, _):
        answers = carrier.ask({0: asked(7, *arrays), 1: asked(8)}, 10)
        assert [answers[peer].header.values["value"] for peer in (0, 1)] == [7, 8]
        for sent, came in zip(arrays, answers[0].arrays, strict=True):
            assert (sent.dtype, sent.shape) == (came.dtype, came.shape)
            assert sent.tobytes() == came.tobytes()
        assert carrier.lost() == {}


def last_byte(name: str, request: RequestHeader, arrays: list) -> list:
    last = {"last": int(arrays[0][-1])}
    return [encode(AnswerHeader(number=request.number, process=name, values=last))]


@pytest.mark.parametrize("size", [2**24, pytest.param(GIB, marks=pytest.mark.soak)])
def test_a_large_message_travels(tmp_path, size):
    big = np.zeros(size, np.uint8)
    big[-1] = 7
    with carrying(tmp_path, last_byte, frame_bytes=2 * GIB) as (carrier, _):
        assert carrier.ask({0: asked(0, big)}, 60)[0].header.values == {"last": 7}


def test_a_request_or_answer_that_a_connection_lost_is_sent_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.01)
    seen = []

    def deaf_at_first(name: str, request: RequestHeader, arrays: list) -> list:
        seen.append(request.number)
        if len(seen) == 1:  # idle, as far as it knows
            return [encode(AnswerHeader(process=name, says="hello"))] * 2
        return echo(name, request, arrays)

    with carrying(tmp_path, deaf_at_first) as (carrier, _):
        assert carrier.ask({0: asked(5)}, 10)[0].header.values == {"value": 5}
    assert seen == [1, 1]


def two(name: str, request: RequestHeader, arrays: list) -> list:
    return echo(name, request, arrays) * 2


def late(name: str, request: RequestHeader, arrays: list) -> list:
    """The answer to the request before, and then its own."""
    before = AnswerHeader(number=request.number - 1, process=name, values={"value": -1})
    return [encode(before), *echo(name, request, arrays)]


def of_another_process(name: str, request: RequestHeader, arrays: list) -> list:
    return [*echo(NAMES[3], request, arrays), *echo(name, request, arrays)]


@pytest.mark.parametrize("reply", [two, late, of_another_process])
def test_an_answer_that_comes_twice_or_is_not_to_this_request_is_ignored(tmp_path, reply):
    with carrying(tmp_path, reply) as (carrier, _):
        for value in range(3):
            answers = carrier.ask({0: asked(value)}, 10)
            assert answers[0].header.values == {"value": value}
        assert carrier.lost() == {}


def silence(name: str, request: RequestHeader, arrays: list) -> list:
    return []


def failure(name: str, request: RequestHeader, arrays: list) -> list:
    return [encode(AnswerHeader(number=request.number, process=name, error="out of memory"))]


def nonsense(name: str, request: RequestHeader, arrays: list) -> list:
    return [[b"\x80\x04pickle"]]


def one_array_too_few(name: str, request: RequestHeader, arrays: list) -> list:
    return [encode(AnswerHeader(number=request.number, process=name), [np.zeros(4)])[:1]]


def a_lie_about_its_length(name: str, request: RequestHeader, arrays: list) -> list:
    header, body = encode(AnswerHeader(number=request.number, process=name), [np.zeros(4)])
    return [[header, bytes(body)[:-1]]]


def another_version(name: str, request: RequestHeader, arrays: list) -> list:
    (header,) = encode(AnswerHeader(number=request.number, process=name))
    return [[header.replace(b'"version":2', b'"version":1')]]


LOST = {
    silence: "no answer to train within 0.3 s",
    failure: "out of memory",
    nonsense: "nonsense: ",
    one_array_too_few: "nonsense: 0 arrays, expected 1",
    a_lie_about_its_length: "nonsense: 31 bytes, expected 32 of float64[4]",
    another_version: "nonsense: version",
}


@pytest.mark.parametrize("reply", LOST)
def test_a_peer_that_fails_is_lost_with_one_line_and_the_others_answer(tmp_path, reply):
    with carrying(tmp_path, reply, echo) as (carrier, _):
        answers = carrier.ask({0: asked(1), 1: asked(2)}, 0.3 if reply is silence else 10)
        assert list(answers) == [1]
        (line,) = carrier.lost().values()
        assert line.startswith(LOST[reply]) and "\n" not in line
        assert carrier.ask({0: asked(3), 1: asked(4)}, 10).keys() == {1}
        assert carrier.lost() == {0: "its process is not there"}


@pytest.mark.parametrize("values", [{"gang": "x" * 400}, {"gang": []}, {"gang": "", "more": 1}])
def test_a_hello_that_is_none_is_no_process_and_costs_the_others_nothing(tmp_path, values):
    with carrying(tmp_path, echo, echo) as (carrier, scripts):
        nonsense = AnswerHeader(process=NAMES[0], says="hello", values=values)
        scripts[1].reply = lambda *_: [encode(nonsense)]
        assert carrier.ask({0: asked(1), 1: asked(2)}, 10).keys() == {0}
        (line,) = carrier.lost().values()
        assert line.startswith("nonsense: ") and len(line) < 200
        assert carrier.ask({0: asked(3)}, 10).keys() == {0}


def test_a_frame_above_the_limit_cuts_its_sender_off(tmp_path):
    def too_much(name: str, request: RequestHeader, arrays: list) -> list:
        return [
            encode(AnswerHeader(number=request.number, process=name), [np.zeros(2**23, np.uint8)])
        ]

    with carrying(tmp_path, too_much, echo) as (carrier, _):
        assert carrier.ask({0: asked(1), 1: asked(2)}, 0.5).keys() == {1}


def test_a_process_started_again_is_another_one_and_has_arrived_anew(tmp_path):
    with carrying(tmp_path, echo) as (carrier, scripts):
        assert carrier.ask({0: asked(1)}, 10)
        assert carrier.arrived() == frozenset()  # it was asked something
        scripts[0].stop()
        secret = Secret.read(tmp_path / processes.SECRET)
        scripts[0] = Script(carrier, secret, 0, echo, NAMES[1])
        until = time.monotonic() + 10
        while carrier.arrived() != {0} and time.monotonic() < until:
            time.sleep(0.01)
        assert carrier.lost() == {0: "its process was started again"}
        assert carrier.ask({0: asked(2)}, 10)[0].header.process == NAMES[1]


def test_nobody_gets_in_without_the_runs_secret(tmp_path):
    with carrying(tmp_path, echo) as (carrier, _):
        stranger = Secret.new()._replace(server=Secret.read(tmp_path / processes.SECRET).server)
        script = Script(carrier, stranger, 1, echo)
        assert carrier.wait(frozenset({1}), 0.5) == frozenset()
        script.stop()


def test_a_secret_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "secret.json"
    Secret.new().write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(LockstepError, match="others may read it, expected mode 600"):
        Secret.read(path)
