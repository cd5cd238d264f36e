"""Peers as processes: children of the trainer, and others that connect to it by hand."""

import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.carrier.answers import Hello
from pipeline.carrier.carrier import Answered, Asked
from pipeline.carrier.channel import Heard, Hub
from pipeline.carrier.frames import AnswerHeader, Buffer, FrameError, checked, decode
from pipeline.carrier.secret import Place

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between looks at whether a child lives
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a child that ended is started again
AT_ONCE = 4  # messages of each process that are taken between two looks at anything else


@dataclass
class _Process:
    """What is known of a peer's process.

    Attributes:
      name: Random name that it gave itself; None until it has said hello.
      child: The process, if this trainer started it.
      fresh: Whether it was not asked anything since it came.
      leaving: Whether it asked to leave.
      gang: Where it can coordinate the processes of its peer, host:port.
      starts: How often it was started.
      again: When to start it again.
    """

    name: str | None = None
    child: subprocess.Popen | None = None
    fresh: bool = False
    leaving: bool = False
    gang: str = ""
    starts: int = 0
    again: float = 0.0

    def forget(self) -> None:
        """Forget who it is, until it says hello."""
        self.name, self.fresh, self.leaving = None, False, False


@dataclass
class _Open:
    """A request that waits for its answer."""

    sent: float
    buffers: list[Buffer]
    connection: bytes | None  # over which it was sent the last time
    answer: Answered | None = None


@dataclass
class Processes:
    """A carrier to processes that connect to this one, some of which it starts.

    All processes of a peer get its requests, and the first one's answer is the peer's. A peer is
    lost with any of them; those that it had then end, since they cannot go on without that one.

    Attributes:
      hub: This end.
      folder: Where the logs are.
      command: The command of a child, without its peer.
      environment: Its environment, whichever it is.
      environment_of: Returns what else is in that of one.
      spawned: The peers whose processes this one starts, and starts again when they end.
      ranks: How many processes a peer has.
    """

    hub: Hub
    folder: Path
    command: list[str]
    environment: dict[str, str]
    environment_of: Callable[[Place], dict[str, str]]
    spawned: frozenset[int]
    ranks: int = 1
    _of: dict[Place, _Process] = field(default_factory=dict)
    _open: dict[Place, _Open] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)
    _trainer: str = field(default_factory=lambda: secrets.token_hex(8))
    _number: int = 0

    def __post_init__(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for peer in sorted(self.spawned):
            for place in self._places(peer):
                self._start(place)

    def ask(self, asked: Mapping[int, Asked], seconds: float) -> dict[int, Answered]:
        """Send each peer its request at once, and return the answers that came in time."""
        until = time.monotonic() + seconds
        self._open = {}
        self._number += 1
        for peer, one in asked.items():
            gang = self._gang(peer)
            if not all(process.name for process in gang):
                self.lose(peer, "its process is not there")
                continue
            buffers = one.buffers(self._trainer, self._number, gang[0].gang)
            for place, process in zip(self._places(peer), gang, strict=True):
                process.fresh = False
                sent = time.monotonic()
                self._open[place] = _Open(sent, buffers, self.hub.send(place, buffers))
        while self._waiting() and (left := until - time.monotonic()) > 0:
            self._hear(min(left, POLL_SECONDS))
            self._look_after_children()
        for peer in self._waiting():
            operation = asked[peer].operation
            self.lose(peer, f"no answer to {operation} within {seconds:.3g} s")
        answered = {
            peer: one.answer
            for (peer, rank), one in self._open.items()
            if rank == 0 and one.answer is not None and peer not in self._lost
        }
        self._open = {}
        return answered

    def lost(self) -> dict[int, str]:
        """Return the peers lost since the last call, each with the reason in one line."""
        self._drain()
        lost, self._lost = self._lost, {}
        return lost

    def arrived(self) -> frozenset[int]:
        """Return the peers whose process is there, and was not asked anything since it came."""
        self._drain()
        peers = {peer for peer, _ in self._of}
        return frozenset(p for p in peers if all(process.fresh for process in self._gang(p)))

    def leaving(self) -> frozenset[int]:
        """Return the peers whose processes have asked to leave."""
        self._drain()
        return frozenset(peer for (peer, _), process in self._of.items() if process.leaving)

    def dismiss(self, peer: int) -> None:
        """Have a peer's process end, and do not start it again."""
        self.spawned -= {peer}
        self._send_exit(self._places(peer))
        for process in self._gang(peer):
            process.forget()

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        """Wait until all of these have arrived, and return those that have."""
        until = time.monotonic() + seconds
        while peers - self.arrived() and (left := until - time.monotonic()) > 0:
            self._hear(min(left, POLL_SECONDS))
        return peers & self.arrived()

    def close(self) -> None:
        """End the processes that this one started, and let go of the others."""
        self._send_exit(self._of)
        children = [process.child for process in self._of.values() if process.child]
        _end(children)
        self.hub.close()

    def _send_exit(self, places: Iterable[Place]) -> None:
        for place in places:
            self.hub.send(place, Asked("exit", {}).buffers(self._trainer, self._number))

    def _places(self, peer: int) -> list[Place]:
        return [(peer, rank) for rank in range(self.ranks)]

    def _gang(self, peer: int) -> list[_Process]:
        """The processes of a peer."""
        return [self._of.setdefault(place, _Process()) for place in self._places(peer)]

    # ---- What is heard ----

    def _waiting(self) -> list[int]:
        """The peers whose answer is awaited."""
        waiting = {peer for (peer, _), one in self._open.items() if one.answer is None}
        return sorted(waiting - self._lost.keys())

    def _drain(self) -> None:
        """Take note of what has been said, however much more there is, and of children's ends."""
        for _ in range(AT_ONCE * len(self.hub.places)):
            if not self._hear(0):
                break
        self._look_after_children()

    def _hear(self, seconds: float) -> bool:
        """Take note of what is said next; return whether anything was."""
        heard = self.hub.receive(seconds)
        if heard is not None:
            self._take(heard)
        return heard is not None

    def _take(self, heard: Heard) -> None:
        place, peer = heard.place, heard.place[0]
        process = self._of.setdefault(place, _Process())
        try:
            header, arrays = decode(AnswerHeader, heard.buffers)
            if header.says == "hello":
                process.gang = checked(Hello, header.values, "a hello").gang
        except FrameError as error:
            self.lose(peer, f"nonsense: {heard.flaw or error}")
            return
        if header.says == "hello":
            self._greet(heard, process, header.process)
        elif header.process != process.name:
            return  # of a process before
        elif header.says == "leave":
            process.leaving = True
        elif header.number == self._number and (one := self._open.get(place)) and not one.answer:
            if header.error is None:
                one.answer = Answered(header, arrays, time.monotonic() - one.sent)
            else:
                self.lose(peer, header.error)

    def _greet(self, heard: Heard, process: _Process, name: str) -> None:
        """A process says hello over each new connection, and when nobody has asked it for a while.

        One that is asked, and says so over another connection than that of the request, has lost
        the request or its answer with the one before, and is asked again.
        """
        one = self._open.get(heard.place)
        if one and process.name == name and not one.answer and one.connection != heard.connection:
            one.connection = self.hub.send(heard.place, one.buffers)
        if process.name is None:
            process.name, process.fresh = name, True
        elif process.name != name:
            self.lose(heard.place[0], "its process was started again")
            process.name, process.fresh = name, True

    def lose(self, peer: int, why: str) -> None:
        """Forget a peer's process; if it is there after all, it will say hello again.

        If a peer has several processes, those already in use end too, since they depend on each
        other.
        """
        self._lost.setdefault(peer, why)
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
        with open(self._log(place), "ab") as file:
            process.child = subprocess.Popen(
                [*self.command, "--secret", os.fspath(self.hub.secrets.path(peer))]
                + ["--peer", str(peer), "--rank", str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment | self.environment_of(place),
                start_new_session=True,  # Ctrl-C is the trainer's, which ends them in order
            )

    def _log(self, place: Place) -> Path:
        peer, rank = place
        name = f"peer-{peer:03}.{rank}.log" if self.ranks > 1 else f"peer-{peer:03}.log"
        return self.folder / "logs" / name


def start(
    hub: Hub,
    folder: Path,
    peers: Iterable[int],
    *,
    environment: Mapping[str, str],
    environment_of: Callable[[Place], dict[str, str]],
    backend: str,
    ranks: int = 1,
) -> Processes:
    """Return a carrier to processes, and start those of `peers`.

    Args:
      hub: Where they connect to.
      folder: Where the logs are kept.
      peers: The peers whose processes are started here; others connect by hand.
      environment: Environment of the processes, beside this one's.
      environment_of: Returns what else is in that of one: (peer, rank).
      backend: "cpu" or "cuda".
      ranks: How many processes a peer has.
    """
    command = [sys.executable, "-m", f"{__package__.rpartition('.')[0]}.sidecar"]
    command += ["--parent-pid", str(os.getpid()), "--init-method", hub.address]
    command += ["--backend", backend, "--world-size", str(ranks)]
    environment = {**os.environ, **environment}
    return Processes(hub, folder, command, environment, environment_of, frozenset(peers), ranks)


def _end(children: list[subprocess.Popen], seconds: float = 3.0) -> None:
    """Wait for children that were asked to end; terminate, then kill those that do not."""
    until = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
