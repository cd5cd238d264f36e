"""The process of one peer, which stage train starts, or somebody by `lockstep sidecar`.

It keeps the peer's state, does what the trainer asks for and answers; docs/reference/sidecar.md.
It ends on request, together with the trainer that started it, or after long without a trainer. On
SIGTERM it leaves the run. JAX is imported with the first request, which says how to set it up.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import LockstepError, brief
from parts.carrier import requests
from parts.carrier.channel import Line, PeerSecret, endpoint
from parts.carrier.requests import AnswerHeader, Buffer, FrameError, PeerRequest, encode
from pipeline import runfile
from pipeline.runfile import strangers
from pipeline.runfile.strangers_values import Use
from pipeline.stage import devices

if TYPE_CHECKING:
    from parts.carrier.handlers import Operations

LOOK_SECONDS = 0.5  # between two looks at whether it is to leave
HELLO_SECONDS = 2.0  # between two hellos of a process that nobody asks anything
LEAVE_SECONDS = 30.0  # after which a process that asked to leave ends by itself
WAIT_SECONDS = 3600.0
TURNED_AWAY = 3  # attempts to connect that somebody ended, before a line reports it
HEARTBEAT_SECONDS = 30  # a gang's process that says nothing for so long ends the others


Reader = Callable[[dict], runfile.Run]  # of the tables of a run


class Rank(NamedTuple):
    """Which of the processes of one peer a sidecar is."""

    number: int = 0  # process 0 answers for all
    count: int = 1
    address: str = ""  # host:port where process 0 coordinates them; empty for the others


def _own(tables: dict) -> runfile.Run:
    """Return the run of a trainer that started this sidecar itself."""
    return runfile.parse(tables, "create")


def _of_others(own: Path | None, tables: dict) -> runfile.Run:
    """Return a sidecar's run of a trainer that somebody else may have started.

    `own` is a run file of who starts this process: `[runtime]` is from there, and its workload is
    the only one that runs here.
    """
    mine = runfile.load(own) if own else None
    runtime = mine.runtime if mine else runfile.Runtime(carrier="processes")
    same = mine and tables.get("workload") == mine.model_dump(mode="json").get("workload")
    keys = ("workload.factory", "workload.command") if same else ()
    consents = dict.fromkeys(keys, lambda value: "")  # it lacks nothing
    return strangers.read(tables, "create", Use.REPEATED, runtime, consents, "its own --run")


class PeerProcess:
    """A sidecar, the process of a peer: it reads requests, has them done and answers them."""

    def __init__(self, peer: int, rank: Rank = Rank(), read: Reader = _own):  # noqa: B008 (it is immutable)
        self.peer, self.rank, self.read = peer, rank, read
        self.name = secrets.token_hex(8)
        self.operations: Operations | None = None
        self._gang = ""  # the address at which it has joined the peer's other processes
        self._last: tuple[tuple[str, int], list[Buffer]] | None = None

    def hello(self) -> list[Buffer]:
        """Return the message of a sidecar that waits for a request."""
        hello = requests.Hello(peer=self.peer, pid=os.getpid(), gang=self.rank.address)
        header = AnswerHeader(process=self.name, says="hello", values=hello.model_dump(mode="json"))
        return encode(header)

    def leave(self) -> list[Buffer]:
        """Return the message of a sidecar that wants to leave the run."""
        return encode(AnswerHeader(process=self.name, says="leave"))

    def answer(self, buffers: list[Buffer]) -> list[Buffer] | None:
        """Return the sidecar's answer to a request; None if it is to exit. An error is one line.

        A request that comes again, because a connection lost it or its answer, is answered again.
        """
        number = None
        try:
            head, arrays = requests.decode(requests.RequestHeader, buffers)
            number = head.number
            request = PeerRequest.read(head, arrays)
            if isinstance(request.values, requests.Exit):
                return None
            if self._last and self._last[0] == (head.trainer, number):
                return self._last[1]
            if isinstance(request.values, requests.Create):
                self.operations = self._create(request.values, head.gang)
            if self.operations is None:
                raise FrameError(f"{request.operation} before create, expected create first")
            outcome = self.operations.handle(request)
            values = outcome.values.model_dump(mode="json")
            header = AnswerHeader(number=number, process=self.name, values=values)
            answer = encode(header, outcome.arrays)
            self._last = (head.trainer, number), answer
            return answer
        except Exception as error:  # whatever it is, the trainer hears of it
            traceback.print_exc()  # into the peer's log
            line = brief(f"{type(error).__name__}: {error}", 1000)
            return encode(AnswerHeader(number=number, process=self.name, error=line))

    def _create(self, create: requests.Create, gang: str) -> "Operations":
        """Prepare this sidecar for the run, once: JAX reads its settings when it is imported."""
        run = self.read(create.run)
        if self.operations is not None and gang != self._gang:
            raise LockstepError(
                "rank 0 of this peer is another process than before; start this process again"
            )
        if self.operations is not None and self.operations.run == run:
            return self.operations
        if self.rank.count != run.peers.processes:
            raise LockstepError(
                f"--world-size {self.rank.count}, expected [peers] processes = "
                f"{run.peers.processes}"
            )
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(run.peers.fsdp // self.rank.count))
        devices.prepare(run)
        if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            devices.keep_compiled(Path(folder))
        if self.rank.count > 1:
            self._join(gang, run.runtime.answer_seconds)
        from lockstep.machine import allocator
        from parts.carrier.handlers import Operations

        allocator.trim_after_compiling()
        return Operations(run, create.model, create.first_step, create.columns)

    def _join(self, gang: str, seconds: float) -> None:
        """Join the sidecars of the same peer, once, before JAX sees a device."""
        if self._gang:
            raise LockstepError(
                "this process belongs to another start of its peer, expected a new process; start "
                "all processes of the peer again"
            )
        self._gang = gang
        os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "0"  # it would take SIGTERM from us
        import jax

        jax.distributed.initialize(
            gang,
            coordinator_bind_address=self.rank.address or None,  # not on every interface
            num_processes=self.rank.count,
            process_id=self.rank.number,
            initialization_timeout=max(1, round(seconds)),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )


def serve(sidecar: PeerProcess, line: Line, wait_seconds: float = WAIT_SECONDS) -> None:
    """Answer requests until the sidecar is asked to exit, or its peer leaves and is not needed."""
    asked_to_leave: list[float] = []

    def leave(number: int, frame: FrameType | None) -> None:
        asked_to_leave.append(time.monotonic())

    signal.signal(signal.SIGTERM, leave)
    greeted = left = 0  # the connection over which it said hello, and that it leaves
    last_sent, alone = 0.0, _TrainerWatch(line, wait_seconds)
    while True:
        buffers = line.receive(LOOK_SECONDS)
        if buffers is not None:
            answer = sidecar.answer(buffers)
            if answer is None:
                return
            line.send(answer)
            last_sent = time.monotonic()
        alone.look()
        now = time.monotonic()
        quiet = buffers is None and now > last_sent + HELLO_SECONDS
        if asked_to_leave:
            if not line.connected or now > asked_to_leave[0] + LEAVE_SECONDS:
                return
            if left == line.connections and quiet:
                return
            if left != line.connections and line.send(sidecar.leave()):
                left, last_sent = line.connections, now
        elif (greeted != line.connections or quiet) and line.send(sidecar.hello()):
            greeted, last_sent = line.connections, now


class _TrainerWatch:
    """Report that the sidecar has no trainer, once each time, and give up after a while."""

    def __init__(self, line: Line, wait_seconds: float):
        self.line, self.wait_seconds = line, wait_seconds
        self.reported = ""

    def look(self) -> None:
        line, why = self.line, ""
        if line.turned_away >= TURNED_AWAY:
            why = "whoever answers there ends the handshake: another run's trainer, or no trainer"
        elif line.failures:
            why = "no trainer there"
        if not line.connected and time.monotonic() > line.since + self.wait_seconds:
            raise LockstepError(
                f"{line.address}: {why or 'no trainer there'}, for {self.wait_seconds:g} s: the "
                "run has ended, or its host cannot be reached"
            )
        if why != self.reported:
            retry = f"; trying again, for {self.wait_seconds:g} s"
            status = f"{why}{retry}" if why else "connected"
            print(f"{line.address}: {status}", flush=True)
        self.reported = why


def end_with(parent: int) -> None:
    """End this sidecar when the trainer that started it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_by_signals() -> None:
    """End this sidecar some time after a signal, even while it computes and hears nothing."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with writer:  # keeps it open
            while (number := reader.recv(1)[0]) not in (signal.SIGTERM, signal.SIGINT):
                pass
        time.sleep(LEAVE_SECONDS + 2 if number == signal.SIGTERM else 2)
        os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


def main(  # noqa: PLR0913 - each is an option
    connect: str,
    secret: Path,
    peer: int | None = None,
    *,
    run: Path | None = None,
    world_size: int = 1,
    rank: int = 0,
    backend: str = "cpu",
    wait: float = WAIT_SECONDS,
    parent_pid: int = 0,
) -> None:
    """Be a sidecar, the process of one peer, with the options of `lockstep sidecar`."""
    address = endpoint(connect)
    keys = PeerSecret.read(secret)
    if backend not in ("cpu", "cuda"):
        raise LockstepError(f"--backend {backend}, expected cpu or cuda")
    if rank >= world_size:
        raise LockstepError(f"--rank {rank}, expected less than --world-size {world_size}")
    if peer not in (None, keys.peer):
        raise LockstepError(f"{secret}: of peer {keys.peer}, expected --peer {peer}")
    if world_size != len(keys.private):
        raise LockstepError(f"--world-size {world_size}, expected {len(keys.private)}: {secret}")
    if parent_pid:
        end_with(parent_pid)
    end_by_signals()
    os.environ["JAX_PLATFORMS"] = backend
    coordinator = _free_address(address) if world_size > 1 and rank == 0 else ""
    line = Line(address, keys, rank)
    try:
        read = _own if parent_pid else partial(_of_others, run)
        serve(PeerProcess(keys.peer, Rank(rank, world_size, coordinator), read), line, wait)
    finally:
        line.close()
    if world_size > 1:
        sys.stdout.flush()
        os._exit(0)  # jax.distributed would wait for the others, and one may be gone


def _free_address(trainer: str) -> str:
    """Return host:port, free for now, of this machine as the trainer's network sees it."""
    host, _, port = trainer.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        ip = probe.getsockname()[0]
    with socket.socket() as free:
        free.bind((ip, 0))
        return f"{ip}:{free.getsockname()[1]}"
