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

from pipeline.carrier.carrier import Answered, Asked
from pipeline.carrier.channel import Hub, Secret
from pipeline.carrier.frames import AnswerHeader, Buffer, FrameError, decode

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between looks at whether a child lives
SECRET = "secret.json"
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds before a child that ended is started again


@dataclass
class _Process:
    """What is known of a peer's process.

    Attributes:
      name: Random name that it gave itself; None until it has said hello.
      child: The process, if this trainer started it.
      fresh: Whether it was not asked anything since it came.
      leaving: Whether it asked to leave.
      starts: How often it was started.
      again: When to start it again.
    """

    name: str | None = None
    child: subprocess.Popen | None = None
    fresh: bool = False
    leaving: bool = False
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
    hellos: int = 0  # since it was sent
    answer: Answered | None = None


@dataclass
class Processes:
    """A carrier to processes that connect to this one, some of which it starts.

    Attributes:
      hub: This end.
      folder: Where the secret and the logs are.
      command: The command of a child, without the peer's number.
      environment: Its environment, whichever the peer.
      environment_of: Returns what else is in a peer's.
      spawned: The peers whose processes this one starts, and starts again when they end.
    """

    hub: Hub
    folder: Path
    command: list[str]
    environment: dict[str, str]
    environment_of: Callable[[int], dict[str, str]]
    spawned: frozenset[int]
    _of: dict[int, _Process] = field(default_factory=dict)
    _open: dict[int, _Open] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)
    _trainer: str = field(default_factory=lambda: secrets.token_hex(8))
    _number: int = 0

    def __post_init__(self) -> None:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for peer in sorted(self.spawned):
            self._start(peer)

    def ask(self, asked: Mapping[int, Asked], seconds: float) -> dict[int, Answered]:
        """Send each peer its request at once, and return the answers that came in time."""
        until = time.monotonic() + seconds
        self._open = {}
        self._number += 1
        for peer, one in asked.items():
            process = self._of.get(peer)
            if process is None or process.name is None:
                self._lose(peer, "its process is not there")
            else:
                process.fresh = False
                buffers = one.buffers(self._trainer, self._number)
                self._open[peer] = _Open(time.monotonic(), buffers)
                self.hub.send(_name(peer), buffers)  # again, where nobody is there for now
        while self._waiting() and (left := until - time.monotonic()) > 0:
            self._hear(min(left, POLL_SECONDS))
            self._look_after_children()
        for peer in self._waiting():
            operation = asked[peer].operation
            self._lose(peer, f"no answer to {operation} within {seconds:.3g} s")
        answered = {p: one.answer for p, one in self._open.items() if one.answer is not None}
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
        return frozenset(peer for peer, process in self._of.items() if process.fresh)

    def leaving(self) -> frozenset[int]:
        """Return the peers whose processes have asked to leave."""
        self._drain()
        return frozenset(peer for peer, process in self._of.items() if process.leaving)

    def dismiss(self, peer: int) -> None:
        """Have a peer's process end, and do not start it again."""
        self.spawned -= {peer}
        self._send_exit([peer])
        self._of[peer].forget()

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

    def _send_exit(self, peers: Iterable[int]) -> None:
        self._number += 1
        for peer in peers:
            self.hub.send(_name(peer), Asked("exit", {}).buffers(self._trainer, self._number))

    # ---- What is heard ----

    def _waiting(self) -> list[int]:
        """The peers whose answer is awaited."""
        return [p for p, one in self._open.items() if one.answer is None and p not in self._lost]

    def _drain(self) -> None:
        """Take note of all that has been said, and of children that ended."""
        while self._hear(0):
            pass
        self._look_after_children()

    def _hear(self, seconds: float) -> bool:
        """Take note of what is said next; return whether anything was."""
        heard = self.hub.receive(seconds)
        if heard is None:
            return False
        name, buffers = heard
        peer = _peer(name)
        if peer is not None:
            self._take(peer, buffers)
        return True

    def _take(self, peer: int, buffers: list[Buffer]) -> None:
        process = self._of.setdefault(peer, _Process())
        try:
            header, arrays = decode(AnswerHeader, buffers)
        except FrameError as error:
            self._lose(peer, f"nonsense: {error}")
            return
        if header.says == "hello":
            self._greet(peer, process, header.process)
        elif header.process != process.name:
            return  # of a process before
        elif header.says == "leave":
            process.leaving = True
        elif header.number == self._number and (one := self._open.get(peer)) and not one.answer:
            if header.error is None:
                one.answer = Answered(header, arrays, time.monotonic() - one.sent)
            else:
                self._lose(peer, header.error)

    def _greet(self, peer: int, process: _Process, name: str) -> None:
        """A process says hello when it starts, and whenever nobody has asked it for a while.

        One that says so twice while it is asked has lost the request, or its answer, and is asked
        again.
        """
        one = self._open.get(peer)
        if one and process.name == name and not one.answer:
            one.hellos += 1
            if one.hellos % 2 == 0:
                self.hub.send(_name(peer), one.buffers)
        if process.name is None:
            process.name, process.fresh = name, True
        elif process.name != name:
            self._lose(peer, "its process was started again")
            process.name, process.fresh = name, True

    def _lose(self, peer: int, why: str) -> None:
        """Forget a process; if it is there after all, it will say hello again."""
        self._lost.setdefault(peer, why)
        self._of.setdefault(peer, _Process()).forget()

    # ---- Children ----

    def _look_after_children(self) -> None:
        for peer, process in self._of.items():
            child = process.child
            if child and (status := child.poll()) is not None:
                self._lose(peer, f"its process ended with status {status}, {self._log(peer)}")
                process.child = None
                wait = min(FIRST_WAIT * 2 ** (process.starts - 1), LONGEST_WAIT)
                process.again = time.monotonic() + wait
            elif child is None and peer in self.spawned and time.monotonic() >= process.again:
                self._start(peer)

    def _start(self, peer: int) -> None:
        process = self._of.setdefault(peer, _Process())
        process.starts += 1
        with open(self._log(peer), "ab") as file:
            process.child = subprocess.Popen(
                [*self.command, "--peer", str(peer)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self.environment | self.environment_of(peer),
                start_new_session=True,  # Ctrl-C is the trainer's, which ends them in order
            )

    def _log(self, peer: int) -> Path:
        return self.folder / "logs" / f"peer-{peer:03}.log"


def start(
    folder: Path,
    peers: Iterable[int],
    *,
    listen: str,
    frame_bytes: int,
    environment: Mapping[str, str],
    environment_of: Callable[[int], dict[str, str]],
    backend: str,
) -> Processes:
    """Return a carrier to processes, and start those of `peers`.

    Args:
      folder: Where the secret and the logs are kept.
      peers: The peers whose processes are started here; others connect by hand.
      listen: tcp://HOST:PORT.
      frame_bytes: Size of the largest array that is sent.
      environment: Environment of the processes, beside this one's.
      environment_of: Returns what else is in that of a peer.
      backend: "cpu" or "cuda".
    """
    path = folder / SECRET
    if path.exists():  # processes that were started by hand know it
        secret = Secret.read(path)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        secret = Secret.new()
        secret.write(path)
    hub = Hub(listen, secret, frame_bytes)
    command = [sys.executable, "-m", f"{__package__.rpartition('.')[0]}.sidecar"]
    command += ["--parent-pid", str(os.getpid()), "--init-method", hub.address]
    command += ["--backend", backend, "--secret", str(path), "--frame-bytes", str(frame_bytes)]
    environment = {**os.environ, **environment}
    return Processes(hub, folder, command, environment, environment_of, frozenset(peers))


def _name(peer: int) -> bytes:
    return b"peer-%d" % peer


def _peer(name: bytes) -> int | None:
    """The peer of a connection's name; None of a stranger's."""
    number = name.removeprefix(b"peer-")
    return int(number) if number != name and number.isdigit() and len(number) < 6 else None


def _end(children: list[subprocess.Popen], seconds: float = 3.0) -> None:
    """Wait for children that were asked to end; terminate, then kill those that do not."""
    until = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
