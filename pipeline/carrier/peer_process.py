"""A peer's process, however requests reach it: it answers them one after the other."""

import os
import secrets
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.carrier.frames import (
    AnswerHeader,
    Buffer,
    FrameError,
    RequestHeader,
    decode,
    encode,
)
from pipeline.errors import LockstepError, brief

if TYPE_CHECKING:
    from pipeline.carrier.operations import Operations, Outcome


HEARTBEAT_SECONDS = 30  # a gang's process that says nothing for so long ends the others


class Rank(NamedTuple):
    """Which of the processes of one peer a process is.

    number: From 0, which answers for all. count: How many there are. address: Where the first one
      can coordinate them, host:port; of the others, empty.
    """

    number: int = 0
    count: int = 1
    address: str = ""


class PeerProcess:
    """What it is and what it answers.

    Args:
      peer: The peer.
      rank: Which of its processes this is.
    """

    def __init__(self, peer: int, rank: Rank = Rank()):  # noqa: B008 (it is immutable)
        self.peer, self.rank = peer, rank
        self.name = secrets.token_hex(8)
        self.operations: Operations | None = None
        self._gang = ""
        self._last: tuple[tuple[str, int], list[Buffer]] | None = None

    def hello(self) -> list[Buffer]:
        """Return what a process says when nobody has asked it anything."""
        values = {"peer": self.peer, "pid": os.getpid(), "gang": self.rank.address}
        return encode(AnswerHeader(process=self.name, says="hello", values=values))

    def leave(self) -> list[Buffer]:
        """Return what a process says that was asked to end."""
        return encode(AnswerHeader(process=self.name, says="leave"))

    def answer(self, buffers: list[Buffer]) -> list[Buffer] | None:
        """Return the answer to a request; None if it is to exit. An error is one line of it.

        A request that comes again, since a connection lost it or its answer, is answered again.
        """
        number = None
        try:
            request, arrays = decode(RequestHeader, buffers)
            number = request.number
            if request.operation == "exit":
                return None
            if self._last and self._last[0] == (request.trainer, number):
                return self._last[1]
            result = self._do(request, arrays)
            header = AnswerHeader(number=number, process=self.name, values=result.values)
            answer = encode(header, result.arrays)
            self._last = (request.trainer, number), answer
            return answer
        except Exception as error:  # whatever it is, the trainer hears of it
            traceback.print_exc()  # into the peer's log
            line = brief(f"{type(error).__name__}: {error}", 1000)
            return encode(AnswerHeader(number=number, process=self.name, error=line))

    def _do(self, request: RequestHeader, arrays: list) -> "Outcome":
        if request.operation == "create":
            self._prepare(request.values, request.gang)
        if self.operations is None:
            raise FrameError(f"{request.operation} before create, expected it after")
        return self.operations.handle(request, arrays)

    def _prepare(self, values: dict, gang: str) -> None:
        """Prepare this process for the run, once: JAX reads its settings when it is imported."""
        from pipeline import runfile
        from pipeline.stage import devices

        run = runfile.parse(values["run"], "create")
        if self.operations is not None and gang != self._gang:
            raise LockstepError("the first of the peer's processes is another one; start this anew")
        if self.operations is not None and self.operations.run == run:
            return
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
        from pipeline.carrier.operations import Operations
        from pipeline.stage import allocator

        allocator.trim_after_compiling()
        columns = tuple(values["columns"])
        self.operations = Operations(run, values["model"], values["first_step"], columns)

    def _join(self, gang: str, seconds: float) -> None:
        """Join the peer's other processes, once, before JAX sees a device."""
        if self._gang:
            raise LockstepError("the peer's processes are in another run; start them anew")
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
