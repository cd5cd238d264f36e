"""What a carrier is: requests out, answers back, and word of who came and who is gone."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.carrier.frames import AnswerHeader, Buffer, RequestHeader, encode


class Asked(NamedTuple):
    """A request to a peer: the operation, its arguments, and its arrays."""

    operation: str
    values: dict
    arrays: Sequence[np.ndarray] = ()

    def buffers(self, trainer: str, number: int, gang: str = "") -> list[Buffer]:
        """Return it as buffers."""
        header = RequestHeader(
            trainer=trainer,
            number=number,
            operation=self.operation,
            gang=gang,
            values=self.values,
        )
        return encode(header, self.arrays)


class Answered(NamedTuple):
    """A peer's answer: the header, its arrays, and seconds since the request was sent."""

    header: AnswerHeader
    arrays: list[np.ndarray]
    seconds: float


class Carrier(Protocol):
    """A way to the peers' processes. It brings bytes and decides nothing."""

    def ask(self, asked: Mapping[int, Asked], seconds: float) -> dict[int, Answered]:
        """Send each peer its request at once, and return the answers that came in time.

        A peer is lost, and absent from the answers, if its process is gone, says nothing in time,
        or answers with what is no answer, or with an error. An answer that comes later, twice, or
        from a process before is ignored. Nothing is done twice.
        """

    def lost(self) -> dict[int, str]:
        """Return the peers lost since the last call, each with the reason in one line."""

    def lose(self, peer: int, why: str) -> None:
        """Lose a peer whose answer turns out to be nonsense, until its process says hello again."""

    def arrived(self) -> frozenset[int]:
        """Return the peers whose process is there, and was not asked anything since it came."""

    def leaving(self) -> frozenset[int]:
        """Return the peers whose processes have asked to leave."""

    def dismiss(self, peer: int) -> None:
        """Have a peer's process end, and do not start it again."""

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        """Wait until all of these have arrived, and return those that have."""

    def close(self) -> None:
        """End the processes that this carrier started, and let go of the others."""
