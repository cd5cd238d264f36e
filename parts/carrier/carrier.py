"""A carrier brings requests to peers' processes and answers back, and tells who came and left.

`Carrier` has the bookkeeping: which requests are open, which peers did not answer in time, and
which are lost. `Processes` is the carrier to children of the trainer, and to processes that connect
to it by hand.
"""

import os
import secrets
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parts.carrier import requests
from parts.carrier.channel import Hub, PeerMessage, Place
from parts.carrier.requests import AnswerHeader, Buffer, FrameError, PeerRequest

LISTEN_SECONDS = 0.1  # at a time, between looks at whether processes live
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a child that ended is started again
MESSAGES_AT_ONCE = 4  # messages of each process that are taken between two looks at anything else


class PeerAnswer(NamedTuple):
    """The answer that a carrier brings of a peer: header, arrays, and seconds since the request."""

    header: AnswerHeader
    arrays: list[np.ndarray]
    seconds: float


@dataclass
class Carrier(ABC):
    """A way to the peers' processes. It brings bytes and decides nothing.

    A peer is lost if its process ends, does not answer in time, or answers with nonsense or an
    error. An answer that comes late, twice or from an earlier process is ignored. No request is
    done twice.
    """

    _trainer: str = field(default_factory=lambda: secrets.token_hex(8), init=False)
    _number: int = field(default=0, init=False)  # of the last request
    _sent: float = field(default=0.0, init=False)  # when it was sent
    _open: dict[int, Any] = field(default_factory=dict, init=False)  # open requests, by peer
    _answers: dict[int, PeerAnswer] = field(default_factory=dict, init=False)  # to the last request
    _lost: dict[int, str] = field(default_factory=dict, init=False)

    def ask(self, by_peer: Mapping[int, PeerRequest], seconds: float) -> dict[int, PeerAnswer]:
        """Bring each peer its request at once, and return the answers that came in time.

        A peer that is lost is absent from the answers.
        """
        self._number, self._sent = self._number + 1, time.monotonic()
        until = self._sent + seconds
        self._open, self._answers = {}, {}
        for peer, request in by_peer.items():
            if self._is_there(peer):
                self._send(peer, request)
            else:
                self.lose(peer, "its process is not there")
        for peer in self._lost:  # lost earlier, and nobody has called `lost` since
            self._open.pop(peer, None)
        while self._open and (left := until - time.monotonic()) > 0:
            self._listen(min(left, LISTEN_SECONDS))
        for peer in sorted(self._open):
            self.lose(peer, f"no answer to {by_peer[peer].operation} within {seconds:.3g} s")
        answers, self._answers = self._answers, {}  # they are large: the caller's alone
        return {peer: answers[peer] for peer in by_peer if peer in answers}

    def lost(self) -> dict[int, str]:
        """Return the peers that the carrier lost since the last call, each with its reason."""
        lost, self._lost = self._lost, {}
        return lost

    def lose(self, peer: int, why: str) -> None:
        """Count a peer as lost to the carrier, until its process says hello again."""
        self._lost.setdefault(peer, why)
        self._open.pop(peer, None)
        self._answers.pop(peer, None)
        self._forget(peer)

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        """Wait until the processes of all of these have arrived, and return those that have."""
        until = time.monotonic() + seconds
        while peers - self.arrived() and (left := until - time.monotonic()) > 0:
            self._listen(min(left, LISTEN_SECONDS))
        return peers & self.arrived()

    def leaving(self) -> frozenset[int]:
        """Return the peers whose processes have asked to leave."""
        return frozenset()

    @abstractmethod
    def arrived(self) -> frozenset[int]:
        """Return the peers whose process runs and has had no request since it came."""

    @abstractmethod
    def dismiss(self, peer: int) -> None:
        """Have a peer's process end, and do not start it again."""

    @abstractmethod
    def close(self) -> None:
        """End the processes that this carrier started, and let go of the others."""

    # ---- What carriers differ in ----

    @abstractmethod
    def _is_there(self, peer: int) -> bool:
        """Return whether a peer's process has said hello and is not lost."""

    @abstractmethod
    def _send(self, peer: int, request: PeerRequest) -> None:
        """Bring a peer a request, and note in `_open`, by peer, what its answer needs."""

    @abstractmethod
    def _listen(self, seconds: float) -> None:
        """Wait for messages of processes, at most so many seconds, and take note of them."""

    @abstractmethod
    def _forget(self, peer: int) -> None:
        """Forget the process of a peer that is lost, until it says hello."""


# ---- Peers as processes of this trainer's, or that connect to it ----


@dataclass
class _Process:
    """State of a peer's process, as its trainer's carrier knows it."""

    name: str | None = None  # random, its own choice; None until it has said hello
    child: subprocess.Popen | None = None  # if this trainer started it
    fresh: bool = False  # whether nobody has asked it anything since it came
    leaving: bool = False
    gang: str = ""  # host:port where it can coordinate the processes of its peer
    starts: int = 0
    again: float = 0.0  # time at which to start it again

    def forget(self) -> None:
        """Forget whose process it is, until it says hello."""
        self.name, self.fresh, self.leaving = None, False, False


@dataclass
class _Open:
    """A request that a carrier brought to one process of a peer, and that has no answer yet."""

    buffers: list[Buffer]
    connection: bytes | None  # over which it was sent the last time
    answer: PeerAnswer | None = None


@dataclass
class Processes(Carrier):
    """A carrier to processes that connect to this one, some of which it starts.

    All processes of a peer get its requests, and the first one's answer is the peer's. A peer is
    lost with any of them; those that it had then end, since they cannot go on without that one.
    """

    hub: Hub
    folder: Path  # of the logs
    spawned: frozenset[int]  # peers that it starts, and starts again; others connect by hand
    environment_of: Callable[[Place], dict[str, str]]  # what a child has beside the trainer's
    backend: str = "cpu"  # or "cuda"
    ranks: int = 1  # processes of a peer
    _of: dict[Place, _Process] = field(default_factory=dict)
    _open: dict[int, list[_Open]] = field(default_factory=dict, init=False)  # by rank

    def __post_init__(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for peer in sorted(self.spawned):
            for place in self._places(peer):
                self._start(place)

    def lost(self) -> dict[int, str]:
        self._drain()
        return super().lost()

    def arrived(self) -> frozenset[int]:
        self._drain()
        peers = {peer for peer, _ in self._of}
        return frozenset(p for p in peers if all(process.fresh for process in self._gang(p)))

    def leaving(self) -> frozenset[int]:
        self._drain()
        return frozenset(peer for (peer, _), process in self._of.items() if process.leaving)

    def dismiss(self, peer: int) -> None:
        self.spawned -= {peer}
        self._send_exit(self._places(peer))
        for process in self._gang(peer):
            process.forget()

    def close(self) -> None:
        self._send_exit(self._of)
        _end([process.child for process in self._of.values() if process.child])
        self.hub.close()

    def _send_exit(self, places: Iterable[Place]) -> None:
        for place in places:
            self.hub.send(place, PeerRequest(requests.Exit()).buffers(self._trainer, self._number))

    def _places(self, peer: int) -> list[Place]:
        return [(peer, rank) for rank in range(self.ranks)]

    def _gang(self, peer: int) -> list[_Process]:
        return [self._of.setdefault(place, _Process()) for place in self._places(peer)]

    # ---- Requests and messages ----

    def _is_there(self, peer: int) -> bool:
        return all(process.name for process in self._gang(peer))

    def _send(self, peer: int, request: PeerRequest) -> None:
        gang, by_rank = self._gang(peer), []
        buffers = request.buffers(self._trainer, self._number, gang[0].gang)
        for place, process in zip(self._places(peer), gang, strict=True):
            process.fresh = False
            by_rank.append(_Open(buffers, self.hub.send(place, buffers)))
        self._open[peer] = by_rank

    def _listen(self, seconds: float) -> None:
        self._hear(seconds)
        self._look_after_children()

    def _drain(self) -> None:
        """Take the processes' messages that have come, up to a bound; note which children ended."""
        for _ in range(MESSAGES_AT_ONCE * len(self.hub.places)):
            if not self._hear(0):
                break
        self._look_after_children()

    def _hear(self, seconds: float) -> bool:
        """Take the next message of a process, if one comes in time; return whether one did."""
        message = self.hub.receive(seconds)
        if message is not None:
            self._take(message)
        return message is not None

    def _take(self, message: PeerMessage) -> None:
        place, peer = message.place, message.place[0]
        process = self._of.setdefault(place, _Process())
        try:
            header, arrays = requests.decode(AnswerHeader, message.buffers)
            if header.says == "hello":
                process.gang = requests.checked(requests.Hello, header.values, "a hello").gang
        except FrameError as error:
            self.lose(peer, f"nonsense: {message.flaw or error}")
            return
        if header.says == "hello":
            self._greet(message, process, header.process)
        elif header.process != process.name:
            return  # of an earlier process
        elif header.says == "leave":
            process.leaving = True
        elif header.number == self._number and peer in self._open:
            by_rank, rank = self._open[peer], place[1]
            if by_rank[rank].answer is not None:
                return  # it came twice
            if header.error is not None:
                self.lose(peer, header.error)
                return
            by_rank[rank].answer = PeerAnswer(header, arrays, time.monotonic() - self._sent)
            if all(request.answer for request in by_rank):
                del self._open[peer]
                self._answers[peer] = by_rank[0].answer

    def _greet(self, message: PeerMessage, process: _Process, name: str) -> None:
        """Take a hello, which a process sends over each new connection and while it is idle.

        If it has an open request that went over another connection, that connection took the
        request or its answer with it, and the request is sent again.
        """
        peer, rank = message.place
        req = self._open[peer][rank] if peer in self._open else None
        if req and process.name == name and not req.answer and req.connection != message.connection:
            req.connection = self.hub.send(message.place, req.buffers)
        if process.name is None:
            process.name, process.fresh = name, True
        elif process.name != name:
            self.lose(peer, "its process was started again")
            process.name, process.fresh = name, True

    def _forget(self, peer: int) -> None:
        """Forget a peer's processes until they say hello.

        If a peer has several processes, those in use end too, since they depend on each other.
        """
        for place, process in zip(self._places(peer), self._gang(peer), strict=True):
            if self.ranks > 1 and process.name and not process.fresh:
                self._end(place, process)
            process.forget()

    def _end(self, place: Place, process: _Process) -> None:
        """End a process that may hang for another one; a child is started again."""
        if process.child is None:
            self._send_exit([place])
            return
        process.child.kill()
        process.child.wait()
        self._ended(process)

    # ---- Children ----

    def _look_after_children(self) -> None:
        for place, process in list(self._of.items()):
            child, peer = process.child, place[0]
            if child and (status := child.poll()) is not None:
                self._ended(process)
                self.lose(peer, f"its process ended with status {status}, {self._log(place)}")
            elif child is None and peer in self.spawned and time.monotonic() >= process.again:
                self._start(place)

    def _ended(self, process: _Process) -> None:
        process.child = None
        wait = min(FIRST_WAIT * 2 ** (process.starts - 1), LONGEST_WAIT)
        process.again = time.monotonic() + wait

    def _start(self, place: Place) -> None:
        process = self._of.setdefault(place, _Process())
        process.starts += 1
        peer, rank = place
        path = os.pathsep.join(sys.path)  # ours, without the current folder: a user's may be alike
        command = [sys.executable, "-P", "-m", f"{__package__}.commands"]
        command += ["--parent-pid", str(os.getpid()), "--connect", self.hub.address]
        command += ["--backend", self.backend, "--world-size", str(self.ranks), "--rank", str(rank)]
        command += ["--secret", os.fspath(self.hub.secrets.path(peer)), "--peer", str(peer)]
        with open(self._log(place), "ab") as file:
            process.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "PYTHONPATH": path, **self.environment_of(place)},
                start_new_session=True,  # Ctrl-C is the trainer's, which ends them in order
            )

    def _log(self, place: Place) -> Path:
        peer, rank = place
        name = f"peer-{peer:03}.{rank}.log" if self.ranks > 1 else f"peer-{peer:03}.log"
        return self.folder / "logs" / name


def _end(children: list[subprocess.Popen], seconds: float = 3.0) -> None:
    """Wait for the carrier's children that were asked to end; terminate, then kill the others."""
    until = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
