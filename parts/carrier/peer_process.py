"""A peer's process, whichever carrier brings requests and whatever library computes."""

import os
import secrets
import traceback
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from lockstep.errors import brief
from parts.carrier.frames import AnswerHeader, Buffer, FrameError, RequestHeader, decode, encode
from parts.carrier.operation_tables import Asked, Create, Exit, Hello, Outcome


class Rank(NamedTuple):
    """Which of the processes of one peer a process is.

    number: Number of this process; process 0 answers for all. count: Number of processes. address:
      Address at which process 0 coordinates them, host:port; empty for the others.
    """

    number: int = 0
    count: int = 1
    address: str = ""


class Holder(Protocol):
    """Holder of a peer's state in one run, which does the operations."""

    def handle(self, asked: Asked) -> Outcome:
        """Do an operation, whose arguments are checked already.

        Raises:
          FrameError: The arrays are not those that the operation takes.
        """


class PeerProcess(ABC):
    """The process of a peer: it reads requests, has them done and answers them."""

    def __init__(self, peer: int, rank: Rank = Rank()):  # noqa: B008 (it is immutable)
        self.peer, self.rank = peer, rank
        self.name = secrets.token_hex(8)
        self.holder: Holder | None = None
        self._last: tuple[tuple[str, int], list[Buffer]] | None = None

    @abstractmethod
    def create(self, create: Create, gang: str) -> Holder:
        """Return the holder for a run; it then does the operation `create` itself.

        The first of a peer's several processes coordinates them at the address `gang`.

        Raises:
          LockstepError: This process cannot take part in such a run.
        """

    def hello(self) -> list[Buffer]:
        """Return the message of a process that waits to be asked."""
        hello = Hello(peer=self.peer, pid=os.getpid(), gang=self.rank.address)
        header = AnswerHeader(process=self.name, says="hello", values=hello.model_dump(mode="json"))
        return encode(header)

    def leave(self) -> list[Buffer]:
        """Return the message of a process that wants to leave the run."""
        return encode(AnswerHeader(process=self.name, says="leave"))

    def answer(self, buffers: list[Buffer]) -> list[Buffer] | None:
        """Return the answer to a request; None if it is to exit. An error is one line of it.

        A request that comes again, because a connection lost it or its answer, is answered again.
        """
        number = None
        try:
            request, arrays = decode(RequestHeader, buffers)
            number = request.number
            asked = Asked.read(request, arrays)
            if isinstance(asked.values, Exit):
                return None
            if self._last and self._last[0] == (request.trainer, number):
                return self._last[1]
            outcome = self._do(asked, request.gang)
            values = outcome.values.model_dump(mode="json")
            header = AnswerHeader(number=number, process=self.name, values=values)
            answer = encode(header, outcome.arrays)
            self._last = (request.trainer, number), answer
            return answer
        except Exception as error:  # whatever it is, the trainer hears of it
            traceback.print_exc()  # into the peer's log
            line = brief(f"{type(error).__name__}: {error}", 1000)
            return encode(AnswerHeader(number=number, process=self.name, error=line))

    def _do(self, asked: Asked, gang: str) -> Outcome:
        if isinstance(asked.values, Create):
            self.holder = self.create(asked.values, gang)
        if self.holder is None:
            raise FrameError(f"{asked.operation} before create, expected it after")
        return self.holder.handle(asked)
