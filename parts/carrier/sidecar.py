"""The process of one peer: `python -m parts.carrier.sidecar`, which stage train starts.

It keeps the peer's state, does what the trainer asks for and answers; docs/reference/sidecar.md.
It ends on request, together with the trainer that started it, or after long without a trainer. On
SIGTERM it leaves the run.
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from lockstep.errors import LockstepError, shown
from parts.carrier.channel import Line, endpoint
from parts.carrier.jax_process import JaxProcess
from parts.carrier.peer_process import PeerProcess, Rank
from parts.carrier.secret import PeerSecret

LOOK_SECONDS = 0.5  # between two looks at whether it is to leave
HELLO_SECONDS = 2.0  # between two hellos of a process that nobody asks anything
LEAVE_SECONDS = 30.0  # after which a process that asked to leave ends by itself
WAIT_SECONDS = 3600.0
TURNED_AWAY = 3  # attempts to connect that somebody ended, before that is said


def serve(sidecar: PeerProcess, line: Line, wait_seconds: float = WAIT_SECONDS) -> None:
    """Answer requests until one asks to exit, or until a leaving peer is no longer needed.

    Raises:
      LockstepError: There was no trainer for `wait_seconds`, or it does not know the peer's key.
    """
    asked_to_leave: list[float] = []

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        asked_to_leave.append(time.monotonic())

    signal.signal(signal.SIGTERM, leave)
    greeted = left = 0  # over which connection it said hello, and that it leaves
    said, alone = 0.0, _Alone(line, wait_seconds)
    while True:
        buffers = line.receive(LOOK_SECONDS)
        if buffers is not None:
            answer = sidecar.answer(buffers)
            if answer is None:
                return
            line.send(answer)
            said = time.monotonic()
        alone.look()
        now = time.monotonic()
        quiet = buffers is None and now > said + HELLO_SECONDS
        if asked_to_leave:
            if not line.connected or now > asked_to_leave[0] + LEAVE_SECONDS:
                return
            if left == line.connections and quiet:
                return
            if left != line.connections and line.send(sidecar.leave()):
                left, said = line.connections, now
        elif (greeted != line.connections or quiet) and line.send(sidecar.hello()):
            greeted, said = line.connections, now


class _Alone:
    """Report, once each time, that the process has no trainer, and give up after a while."""

    def __init__(self, line: Line, wait_seconds: float):
        self.line, self.wait_seconds = line, wait_seconds
        self.said = ""

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
        if why != self.said:
            waits = f"; trying again, for {self.wait_seconds:g} s"
            said = f"{why}{waits}" if why else "connected"
            print(f"{line.address}: {said}", flush=True)
        self.said = why


def end_with(parent: int) -> None:
    """End this process when the trainer that started it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_by_signals() -> None:
    """End this process some time after a signal, even while it computes and cannot hear of it."""
    heard, told = socket.socketpair()
    told.setblocking(False)
    signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)

    def watch() -> None:
        with told:  # keeps it open
            while (number := heard.recv(1)[0]) not in (signal.SIGTERM, signal.SIGINT):
                pass
        time.sleep(LEAVE_SECONDS + 2 if number == signal.SIGTERM else 2)
        os._exit(128 + number)

    threading.Thread(target=watch, daemon=True).start()


def main(
    init_method: Annotated[str, typer.Option(help="The trainer's address, tcp://HOST:PORT.")],
    secret: Annotated[
        Path, typer.Option(envvar="LOCKSTEP_SECRET", help="File of the peer's secret.")
    ],
    peer: Annotated[
        int | None, typer.Option(min=0, help="Number of the peer; its secret says which.")
    ] = None,
    parent_pid: Annotated[int, typer.Option(help="End with this process; 0: with none.")] = 0,
    world_size: Annotated[int, typer.Option(min=1, help="Processes inside the peer.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="This one among them.")] = 0,
    backend: Annotated[str, typer.Option(help="What to compute on: cpu or cuda.")] = "cpu",
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds after which it ends where no trainer is.")
    ] = WAIT_SECONDS,
) -> None:
    """Be the process of one peer."""
    address = endpoint(init_method)
    theirs = PeerSecret.read(secret)
    if backend not in ("cpu", "cuda"):
        raise LockstepError(f"--backend {backend}, expected cpu or cuda")
    if rank >= world_size:
        raise LockstepError(f"--rank {rank}, expected less than --world-size {world_size}")
    if peer not in (None, theirs.peer):
        raise LockstepError(f"{secret}: of peer {theirs.peer}, expected --peer {peer}")
    if world_size != len(theirs.private):
        raise LockstepError(f"--world-size {world_size}, expected {len(theirs.private)}: {secret}")
    if parent_pid:
        end_with(parent_pid)
    end_by_signals()
    os.environ["JAX_PLATFORMS"] = backend
    here = _free_address(address) if world_size > 1 and rank == 0 else ""
    line = Line(address, theirs, rank)
    try:
        serve(JaxProcess(theirs.peer, Rank(rank, world_size, here)), line, wait)
    finally:
        line.close()
    if world_size > 1:
        sys.stdout.flush()
        os._exit(0)  # jax.distributed would wait for the others, of which one may be gone


def _free_address(trainer: str) -> str:
    """Return host:port, free for now, of this machine as the trainer's network sees it."""
    host, _, port = trainer.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        towards.connect((host, int(port)))  # sends nothing
        here = towards.getsockname()[0]
    with socket.socket() as free:
        free.bind((here, 0))
        return f"{here}:{free.getsockname()[1]}"


if __name__ == "__main__":
    from pipeline.stage import allocator

    allocator.tune()
    try:
        typer.run(main)
    except (LockstepError, OSError) as error:
        sys.exit(f"error: {shown(str(error))}")
