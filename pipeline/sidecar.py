"""The process of one peer: `python -m pipeline.sidecar`, which stage train starts.

It keeps the peer's state, does what the trainer asks for and answers; docs/reference/sidecar.md.
It ends when it is asked to, and with the trainer that started it. On SIGTERM it leaves the run.
"""

import logging
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.carrier.channel import Line, Secret
from pipeline.carrier.frames import AnswerHeader, FrameError, RequestHeader, decode, encode
from pipeline.errors import LockstepError, brief, shown

if TYPE_CHECKING:
    from pipeline.carrier.operations import Operations, Outcome

log = logging.getLogger(__name__)

HELLO_SECONDS = 2.0  # between two hellos of a process that nobody asks anything
LEAVE_SECONDS = 30.0  # after which a process that asked to leave ends by itself
FRAME_BYTES = 2**33


class Sidecar:
    """A peer's process: it answers requests one after the other.

    Args:
      peer: The peer.
    """

    def __init__(self, peer: int):
        self.peer = peer
        self.process = secrets.token_hex(8)
        self.operations: Operations | None = None

    def hello(self) -> list:
        """Return what a process says when nobody has asked it anything."""
        values = {"peer": self.peer, "pid": os.getpid()}
        return encode(AnswerHeader(process=self.process, says="hello", values=values))

    def leave(self) -> list:
        """Return what a process says that was asked to end."""
        return encode(AnswerHeader(process=self.process, says="leave"))

    def answer(self, buffers: list) -> list | None:
        """Return the answer to a request; None if it is to exit. An error is one line of it."""
        number = None
        try:
            request, arrays = decode(RequestHeader, buffers)
            number = request.number
            if request.operation == "exit":
                return None
            result = self._do(request, arrays)
            header = AnswerHeader(number=number, process=self.process, values=result.values)
            return encode(header, result.arrays)
        except Exception as error:  # whatever it is, the trainer hears of it
            traceback.print_exc()  # into the peer's log
            line = brief(f"{type(error).__name__}: {error}", 1000)
            return encode(AnswerHeader(number=number, process=self.process, error=line))

    def _do(self, request: RequestHeader, arrays: list) -> "Outcome":
        if request.operation == "create":
            self._prepare(request.values)
        if self.operations is None:
            raise FrameError(f"{request.operation} before create, expected it after")
        return self.operations.handle(request, arrays)

    def _prepare(self, values: dict) -> None:
        """Prepare this process for the run, once: JAX reads its settings when it is imported."""
        from pipeline import runfile
        from pipeline.stage import devices

        run = runfile.parse(values["run"], "create")
        if self.operations is not None and self.operations.run == run:
            return
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(run.peers.fsdp))
        devices.prepare(run)
        if folder := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            devices.keep_compiled(Path(folder))
        from pipeline.carrier.operations import Operations
        from pipeline.stage import allocator

        allocator.trim_after_compiling()
        columns = tuple(values["columns"])
        self.operations = Operations(run, values["model"], values["first_step"], columns)


def serve(sidecar: Sidecar, line: Line) -> None:
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
    line = Line(init_method, Secret.read(secret), b"peer-%d" % peer, frame_bytes)
    try:
        serve(Sidecar(peer), line)
    finally:
        line.close()


def _check(world_size: int, rank: int, backend: str) -> None:
    if backend not in ("cpu", "cuda"):
        raise LockstepError(f"--backend {backend}, expected cpu or cuda")
    if (world_size, rank) != (1, 0):
        raise LockstepError(
            f"--world-size {world_size} --rank {rank}, expected 1 and 0: a peer of several "
            "processes is not supported; [peers] fsdp gives it several devices of one"
        )


if __name__ == "__main__":
    from pipeline.stage import allocator

    allocator.tune()
    try:
        typer.run(main)
    except (LockstepError, OSError) as error:
        sys.exit(f"error: {shown(str(error))}")
