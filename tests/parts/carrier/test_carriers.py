"""What every carrier does with what peers do: one list of behaviours, over real connections."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import pytest

from lockstep.errors import LockstepError
from parts.carrier import channel
from parts.carrier.carrier import Processes
from parts.carrier.channel import Hub, Line, PeerSecret, Secrets
from parts.carrier.requests import (
    AnswerHeader,
    PeerRequest,
    Recompute,
    RequestHeader,
    decode,
    encode,
)
from tests.parts.carrier.tap import COMMAND, GREETING, HARMS, Tap, stranger

GIB = 2**30
NAMES = ["0" * 15 + digit for digit in "0123"]  # of processes


class Script:
    """A peer's process whose answers are written by a test.

    reply: (process, request, arrays) -> what is sent, each a list of buffers.
    """

    def __init__(self, carrier, peer: int, reply: Callable, name: str = NAMES[0], **given):
        secret = PeerSecret.read(carrier.hub.secrets.path(peer))
        self.line = Line(given.get("address", carrier.hub.address), given.get("secret", secret))
        self.reply, self.name, self.stopped = reply, name, threading.Event()
        self.error: LockstepError | None = None
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        greeted = 0
        try:
            while not self.stopped.is_set():
                buffers = self.line.receive(0.01)
                if buffers is not None:
                    request, arrays = decode(RequestHeader, buffers)
                    for sent in self.reply(self.name, request, arrays):
                        self.line.send(sent)
                elif greeted != self.line.connections:
                    self.line.send(encode(AnswerHeader(process=self.name, says="hello")))
                    greeted = self.line.connections
        except LockstepError as error:
            self.error = error
        self.line.close()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()


def done(name: str, request: RequestHeader, arrays: Sequence = (), **more: object) -> list:
    """The buffers of an answer."""
    return encode(AnswerHeader(number=request.number, process=name, **more), arrays)


def echo(name: str, request: RequestHeader, arrays: list) -> list:
    return [done(name, request, arrays, values=request.values)]


def port_of(carrier) -> int:
    return int(carrier.hub.address.rpartition(":")[2])


@contextmanager
def carrying(
    folder, *replies: Callable, message_bytes: int = 2**22, tapped: bool = False
) -> Iterator[tuple]:
    """A carrier, and the scripts of its peers, or the tap through which they connect."""
    secrets = Secrets(folder / "secrets", len(replies))
    hub = Hub("tcp://127.0.0.1:0", secrets, message_bytes)
    carrier = Processes(hub, folder, frozenset(), lambda place: {})
    tap = Tap(port_of(carrier)) if tapped else None
    address = f"tcp://{tap.address}" if tap else carrier.hub.address
    scripts = [Script(carrier, p, reply, address=address) for p, reply in enumerate(replies)]
    try:
        peers = frozenset(range(len(replies)))
        assert carrier.wait(peers, 10) == peers
        yield carrier, tap or scripts
    finally:
        for script in scripts:
            script.stop()
        if tap:
            tap.close()
        carrier.close()


def arrive(carrier, peer: int) -> None:
    until = time.monotonic() + 10
    while peer not in carrier.arrived() and time.monotonic() < until:
        time.sleep(0.01)


def asked(number: int, *arrays: np.ndarray) -> PeerRequest:
    """A request whose values come back from `echo`."""
    return PeerRequest(Recompute(step=1, count=number), arrays)


def test_each_peer_gets_its_own_request_and_arrays_travel_unchanged(tmp_path):
    arrays = [
        np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
        np.zeros((0, 4), np.int32),
        np.array(1.5, "bfloat16"),
    ]
    with carrying(tmp_path, echo, echo) as (carrier, _):
        answers = carrier.ask({0: asked(7, *arrays), 1: asked(8)}, 10)
        assert [answers[peer].header.values["count"] for peer in (0, 1)] == [7, 8]
        for sent, came in zip(arrays, answers[0].arrays, strict=True):
            assert (sent.dtype, sent.shape) == (came.dtype, came.shape)
            assert sent.tobytes() == came.tobytes()
        assert carrier.lost() == {}


def last_byte(name: str, request: RequestHeader, arrays: list) -> list:
    return [done(name, request, values={"last": int(arrays[0][-1])})]


@pytest.mark.parametrize("size", [2**24, pytest.param(GIB, marks=pytest.mark.soak)])
def test_a_large_message_travels(tmp_path, size):
    big = np.zeros(size, np.uint8)
    big[-1] = 7
    with carrying(tmp_path, last_byte, message_bytes=2 * GIB) as (carrier, _):
        assert carrier.ask({0: asked(0, big)}, 60)[0].header.values == {"last": 7}


def test_a_request_or_answer_that_a_connection_lost_is_sent_again(tmp_path):
    seen = []

    def deaf_at_first(name: str, request: RequestHeader, arrays: list) -> list:
        seen.append(request.number)
        if len(seen) == 1:
            tap.cut()
            return []
        return echo(name, request, arrays)

    with carrying(tmp_path, deaf_at_first, tapped=True) as (carrier, tap):
        assert carrier.ask({0: asked(5)}, 10)[0].header.values["count"] == 5
    assert seen == [1, 1] and tap.count == 2


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_spoiled_lost_or_doubled_byte_costs_a_connection_and_no_more(
    tmp_path, monkeypatch, harm, way
):
    monkeypatch.setattr(channel, "HEARTBEAT_MS", 50)  # shows that a byte is missing
    monkeypatch.setattr(channel, "HEARTBEAT_TIMEOUT_MS", 200)
    monkeypatch.setattr(channel, "RECONNECT_SECONDS", (0.01, 0.1))
    with carrying(tmp_path, echo, tapped=True) as (carrier, tap):
        tap.harm[way] = harm
        answers = carrier.ask({0: asked(7, np.zeros(999, np.uint8))}, 60)
        assert answers[0].header.values["count"] == 7
        assert carrier.lost() == {} and tap.count > 1


def two(name: str, request: RequestHeader, arrays: list) -> list:
    return echo(name, request, arrays) * 2


def late(name: str, request: RequestHeader, arrays: list) -> list:
    """The answer to the request before, and then its own."""
    before = AnswerHeader(number=request.number - 1, process=name, values={"count": -1})
    return [encode(before), *echo(name, request, arrays)]


def of_another_process(name: str, request: RequestHeader, arrays: list) -> list:
    return [*echo(NAMES[3], request, arrays), *echo(name, request, arrays)]


@pytest.mark.parametrize("reply", [two, late, of_another_process])
def test_an_answer_that_comes_twice_or_is_not_to_this_request_is_ignored(tmp_path, reply):
    with carrying(tmp_path, reply) as (carrier, _):
        for value in range(3):
            answers = carrier.ask({0: asked(value)}, 10)
            assert answers[0].header.values["count"] == value
        assert carrier.lost() == {}


def silence(name: str, request: RequestHeader, arrays: list) -> list:
    return []


def failure(name: str, request: RequestHeader, arrays: list) -> list:
    return [done(name, request, error="out of memory")]


def nonsense(name: str, request: RequestHeader, arrays: list) -> list:
    return [[b"\x80\x04pickle"]]


LOST = {
    silence: "no answer to recompute within 0.3 s",
    failure: "out of memory",
    nonsense: "nonsense: ",
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


def test_a_process_that_it_starts_takes_no_source_from_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.py").write_text("a file of the user")
    hub = Hub("tcp://127.0.0.1:0", Secrets(tmp_path / "secrets", 1), 2**22)
    with closing(Processes(hub, tmp_path, frozenset({0}), lambda place: {})) as carrier:
        assert carrier.wait(frozenset({0}), 60) == {0}


def test_a_process_started_again_is_another_one_and_has_arrived_anew(tmp_path):
    with carrying(tmp_path, echo) as (carrier, scripts):
        assert carrier.ask({0: asked(1)}, 10)
        assert carrier.arrived() == frozenset()  # it was asked something
        scripts[0].stop()
        scripts[0] = Script(carrier, 0, echo, NAMES[1])
        arrive(carrier, 0)
        assert carrier.lost() == {0: "its process was started again"}
        assert carrier.ask({0: asked(2)}, 10)[0].header.process == NAMES[1]


def test_a_key_that_the_trainer_does_not_know_ends_its_process_in_one_line(tmp_path):
    with carrying(tmp_path, echo) as (carrier, scripts):
        unknown = Secrets(tmp_path / "other", 1).path(0)
        secret = PeerSecret.read(unknown).model_copy(update={"server": carrier.hub.secrets.public})
        script = Script(carrier, 0, echo, NAMES[1], secret=secret)
        script.thread.join(10)
        assert "the trainer does not know the key of peer 0, expected" in str(script.error)
        assert carrier.ask({0: asked(1)}, 10)[0].header.process == NAMES[0]


def test_a_peers_key_says_which_peer_it_is_whatever_its_process_says(tmp_path):
    def as_another(name: str, request: RequestHeader, arrays: list) -> list:
        values = {"peer": 0}
        return [
            encode(AnswerHeader(process=NAMES[1], says="hello", values=values)),
            encode(AnswerHeader(number=request.number, process=NAMES[0], values={"count": -1})),
        ]

    with carrying(tmp_path, echo, as_another) as (carrier, _):
        answers = carrier.ask({0: asked(8), 1: asked(9)}, 10)
        assert answers[0].header.values["count"] == 8
        assert carrier.lost() == {1: "its process was started again"}


def is_cut_off(connection: socket.socket) -> bool:
    """Waits for the end; what is said before it is no matter."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_of_too_many_strangers_the_oldest_are_cut_off_and_peers_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "MOST_STRANGERS", 3)
    with carrying(tmp_path, echo, echo) as (carrier, _):
        idle = [stranger(port_of(carrier)) for _ in range(40)]
        assert all(is_cut_off(connection) for connection in idle[:-5])
        newest = idle[-1]
        newest.settimeout(0.05)
        assert not is_cut_off(newest)
        assert carrier.ask({0: asked(1), 1: asked(2)}, 10).keys() == {0, 1}
        assert carrier.lost() == {}


def test_a_frame_of_a_stranger_above_a_part_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "HANDSHAKE_MS", 10**6)  # which would end it too
    with carrying(tmp_path, echo) as (carrier, _):
        large = COMMAND + (2 * channel.PART_BYTES).to_bytes(8, "big")
        assert is_cut_off(stranger(port_of(carrier), GREETING + large))


def test_a_message_above_the_limit_loses_its_peer(tmp_path):
    def many(name: str, request: RequestHeader, arrays: list) -> list:
        return [done(name, request, [np.zeros(2**19, np.uint8)] * 9)]

    with carrying(tmp_path, many, echo) as (carrier, _):
        assert carrier.ask({0: asked(1), 1: asked(2)}, 10).keys() == {1}
        assert carrier.lost()[0].startswith("nonsense: a message of 47")


class Talk:
    """A hub at which a process says hello, again and again."""

    places = {"key": (0, 0)}

    def __init__(self):
        self.taken = 0

    def receive(self, seconds: float) -> channel.PeerMessage:
        self.taken += 1
        assert self.taken < 1000, "heard without end"
        hello = encode(AnswerHeader(process=NAMES[self.taken % 2], says="hello"))
        return channel.PeerMessage((0, 0), b"", hello)


def test_a_peer_that_never_stops_talking_does_not_hold_the_trainer(tmp_path):
    carrier = Processes(Talk(), tmp_path, frozenset(), lambda place: {})
    assert carrier.arrived() == {0} and carrier.leaving() == frozenset()
    assert carrier.lost() == {0: "its process was started again"}
