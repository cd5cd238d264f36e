"""A carrier brings requests to peers' processes and answers back, and tells who came and left.

The bookkeeping that all carriers share is here: which requests are open, which peers did not answer
in time, and which are lost. A carrier to another kind of process adds how to send and to listen.
"""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parts.carrier.requests import AnswerHeader, Asked

LISTEN_SECONDS = 0.1  # at a time, between looks at whether processes live


class Answered(NamedTuple):
    """A peer's answer: the header, its arrays, and seconds since the request was sent."""

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
    _open: dict[int, Any] = field(default_factory=dict, init=False)  # open requests, by peer
    _answers: dict[int, Answered] = field(default_factory=dict, init=False)  # to the last request
    _lost: dict[int, str] = field(default_factory=dict, init=False)

    def ask(self, asked: Mapping[int, Asked], seconds: float) -> dict[int, Answered]:
        """Send each peer its request at once, and return the answers that came in time.

        A peer that is lost is absent from the answers.
        """
        until = time.monotonic() + seconds
        self._number += 1
        self._open, self._answers = {}, {}
        together: dict[int, list[int]] = {}  # peers of each distinct request
        for peer, one in asked.items():
            if self._is_there(peer):
                together.setdefault(id(one), []).append(peer)
            else:
                self.lose(peer, "its process is not there")
        for peers in together.values():
            self._send(peers, asked[peers[0]])
        for peer in self._lost:  # before this request, and nobody has called `lost` since
            self._open.pop(peer, None)
        while self._open and (left := until - time.monotonic()) > 0:
            self._listen(min(left, LISTEN_SECONDS))
        for peer in sorted(self._open):
            self.lose(peer, f"no answer to {asked[peer].operation} within {seconds:.3g} s")
        answers, self._answers = self._answers, {}  # they are large: the caller's alone
        return {peer: answers[peer] for peer in asked if peer in answers}

    def lost(self) -> dict[int, str]:
        """Return the peers lost since the last call, each with the reason in one line."""
        lost, self._lost = self._lost, {}
        return lost

    def lose(self, peer: int, why: str) -> None:
        """Count a peer as lost, until its process says hello again."""
        self._lost.setdefault(peer, why)
        self._open.pop(peer, None)
        self._answers.pop(peer, None)
        self._forget(peer)

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        """Wait until all of these have arrived, and return those that have."""
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
    def _send(self, peers: list[int], one: Asked) -> None:
        """Send some peers a request, and note in `_open`, by peer, what its answer needs."""

    @abstractmethod
    def _listen(self, seconds: float) -> None:
        """Wait for what processes say, at most so many seconds, and take note of it."""

    @abstractmethod
    def _forget(self, peer: int) -> None:
        """Forget the process of a peer that is lost, until it says hello."""

    def _answered(
        self, peer: int, header: AnswerHeader, arrays: list[np.ndarray], sent: float
    ) -> Answered | None:
        """Return the answer to a request sent at `sent`; lose the peer if it is an error."""
        if header.error is None:
            return Answered(header, arrays, time.monotonic() - sent)
        self.lose(peer, header.error)
        return None

    def _close_request(self, peer: int, answer: Answered) -> None:
        del self._open[peer]
        self._answers[peer] = answer
