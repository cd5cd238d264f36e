"""A carrier whose processes are objects here, so that they can fail at any moment, at once."""

from collections.abc import Callable, Mapping

import pytest

from parts.carrier.carrier import Carrier, PeerAnswer
from parts.carrier.requests import AnswerHeader, PeerRequest, decode
from parts.carrier.sidecar import PeerProcess

BACK_AFTER = 6  # calls until a process that died is there again
Fails = Callable[[int, str], str]  # peer, operation -> "", "before", "after" or "leave"
Asked, Answered = Mapping[int, PeerRequest], dict[int, PeerAnswer]
Change = Callable[["Loopback", Asked, Answered], Answered]


class Loopback(Carrier):
    """Peers' processes without connections.

    fails: when a peer's process dies: before it does what it is asked, or after, before it answers;
      or asks to leave.
    """

    def __init__(self, count: int, fails: Fails = lambda peer, operation: ""):
        super().__init__()
        self.of: dict[int, PeerProcess | None] = {p: PeerProcess(p) for p in range(count)}
        self.fails, self.calls = fails, 0
        self.fresh, self.gone = set(range(count)), {}
        self.wants: set[int] = set()
        self.events = 0

    def ask(self, by_peer: Mapping[int, PeerRequest], seconds: float) -> dict[int, PeerAnswer]:
        self.calls += 1
        return super().ask(by_peer, seconds)

    def _is_there(self, peer: int) -> bool:
        return self.of[peer] is not None

    def _send(self, peer: int, one: PeerRequest) -> None:
        self.fresh.discard(peer)
        how = self.fails(peer, one.operation)
        self.events += bool(how)
        if how == "leave":
            self.wants.add(peer)
        if how != "before":
            request = [bytes(b) for b in one.buffers(self._trainer, self._number)]
            header, arrays = decode(AnswerHeader, [bytes(b) for b in self.of[peer].answer(request)])
            assert header.error is None, header.error
        if how in ("before", "after"):
            self.of[peer] = None
            self.gone[peer] = self.calls + BACK_AFTER
            self._lost[peer] = f"died {how} {one.operation}"
        else:
            self._answers[peer] = PeerAnswer(header, arrays, 0.01)

    def _listen(self, seconds: float) -> None:
        pass

    def _forget(self, peer: int) -> None:
        if self.of[peer] is not None:
            self.fresh.add(peer)  # it lives, and says so

    def arrived(self) -> frozenset[int]:
        self.calls += 1
        for peer, number in list(self.gone.items()):
            if self.calls >= number:
                self.of[peer] = PeerProcess(peer)
                self.fresh.add(peer)
                del self.gone[peer]
        return frozenset(self.fresh)

    def leaving(self) -> frozenset[int]:
        return frozenset(self.wants)

    def dismiss(self, peer: int) -> None:
        self.wants.discard(peer)
        self.of[peer] = None
        self.gone[peer] = self.calls + BACK_AFTER  # somebody starts it again

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        return peers & self.arrived()

    def close(self) -> None:
        pass


def change_answers(patch: pytest.MonkeyPatch, change: Change) -> None:
    """Have the trainer get what `change` makes of the answers to what it asked."""
    ask = Loopback.ask

    def changed(self: Loopback, asked: Asked, seconds: float) -> Answered:
        return change(self, asked, ask(self, asked, seconds))

    patch.setattr(Loopback, "ask", changed)
