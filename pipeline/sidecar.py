"""The process of one peer: `python -m pipeline.sidecar`, which stage train starts.

It keeps the peer's state, does what the trainer asks for and answers; docs/reference/sidecar.md.
It ends when it is asked to, and with the trainer that started it. On SIGTERM it leaves the run.
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

from pipeline.carrier.channel import Line, Secret
from pipeline.carrier.peer_process import PeerProcess, Rank
from pipeline.errors import LockstepError, shown

HELLO_SECONDS = 2.0  # between two hellos of a process that nobody asks anything
LEAVE_SECONDS = 30.0  # after which a process that asked to leave ends by itself
FRAME_BYTES = 2**33


def serve(sidecar: PeerProcess, line: Line) -> None:
    """AnswerHeader requests until one asks to exit, or nobody wants a peer that leaves."""
    leaving: list[float] = []

    def leave(number: int, frame: FrameType | None) -> None:
        del number, frame
        leaving.append(time.monotonic())

    signal.signal(signal.SIGTERM, leave)
    line.send(sidecar.hello())
    said = False
    while True:
        buffers = line.receive(HELLO_SECONDS)
        if leaving and not said:
            line.send(sidecar.leave())
            said = True
        if leaving and (buffers is None or time.monotonic() > leaving[0] + LEAVE_SECONDS):
            return
        if buffers is None:
            line.send(sidecar.hello())
            continue
        answer = sidecar.answer(buffers)
        if answer is None:
            return
        line.send(answer)


def end_with(parent: int, poll_seconds: float = 0.5) -> None:
    """End this process when the trainer that started it is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(
    init_method: Annotated[str, typer.Option(help="The trainer's address, tcp://HOST:PORT.")],
    peer: Annotated[int, typer.Option(min=0, help="Number of the peer.")],
    secret: Annotated[Path, typer.Option(help="File of the run's secret.")],
    parent_pid: Annotated[int, typer.Option(help="End with this process; 0: with none.")] = 0,
    world_size: Annotated[int, typer.Option(min=1, help="Processes inside the peer.")] = 1,
    rank: Annotated[int, typer.Option(min=0, help="This one among them.")] = 0,
    backend: Annotated[str, typer.Option(help="What to compute on: cpu or cuda.")] = "cpu",
    frame_bytes: Annotated[int, typer.Option(help="Size of the largest array.")] = FRAME_BYTES,
) -> None:
    """Be the process of one peer."""
    _check(world_size, rank, backend)
    if parent_pid:
        end_with(parent_pid)
    os.environ["JAX_PLATFORMS"] = backend
    address = _free_address(init_method) if world_size > 1 and rank == 0 else ""
    line = Line(init_method, Secret.read(secret), b"peer-%d.%d" % (peer, rank), frame_bytes)
    try:
        serve(PeerProcess(peer, Rank(rank, world_size, address)), line)
    finally:
        line.close()
    if world_size > 1:
        sys.stdout.flush()
        os._exit(0)  # jax.distributed would wait for the others, of which one may be gone


def _check(world_size: int, rank: int, backend: str) -> None:
    if backend not in ("cpu", "cuda"):
        raise LockstepError(f"--backend {backend}, expected cpu or cuda")
    if rank >= world_size:
        raise LockstepError(f"--rank {rank}, expected less than --world-size {world_size}")


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
