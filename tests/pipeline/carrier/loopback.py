"""A carrier whose processes are objects here, so that they can fail at any moment, at once."""

from collections.abc import Callable, Mapping

from pipeline.carrier.carrier import Answered, Asked
from pipeline.carrier.frames import AnswerHeader, decode
from pipeline.carrier.peer_process import PeerProcess

BACK_AFTER = 6  # calls until a process that died is there again
Fails = Callable[[int, str], str]  # peer, operation -> "", "before", "after" or "leave"


class Loopback:
    """Peers' processes without connections.

    fails: when a peer's process dies: before it does what it is asked, or after, before it answers;
      or asks to leave.
    """

    def __init__(self, count: int, fails: Fails = lambda peer, operation: ""):
        self.of: dict[int, PeerProcess | None] = {p: PeerProcess(p) for p in range(count)}
        self.fails, self.number = fails, 0
        self.fresh, self.gone = set(range(count)), {}
        self.lost_now: dict[int, str] = {}
        self.wants: set[int] = set()
        self.events = 0

    def ask(self, asked: Mapping[int, Asked], seconds: float) -> dict[int, Answered]:
        self.number += 1
        answers = {}
        for peer, one in asked.items():
            process = self.of[peer]
            if process is None:
                self.lost_now.setdefault(peer, "its process is not there")
                continue
            self.fresh.discard(peer)
            how = self.fails(peer, one.operation)
            self.events += bool(how)
            if how == "leave":
                self.wants.add(peer)
            if how != "before":
                buffers = process.answer([bytes(b) for b in one.buffers("f" * 16, self.number)])
                header, arrays = decode(AnswerHeader, [bytes(b) for b in buffers])
                assert header.error is None, header.error
            if how in ("before", "after"):
                self.of[peer] = None
                self.gone[peer] = self.number + BACK_AFTER
                self.lost_now[peer] = f"died {how} {one.operation}"
            else:
                answers[peer] = Answered(header, arrays, 0.01)
        return answers

    def lost(self) -> dict[int, str]:
        lost, self.lost_now = self.lost_now, {}
        return lost

    def lose(self, peer: int, why: str) -> None:
        self.lost_now.setdefault(peer, why)
        self.fresh.add(peer)  # it lives, and says so

    def arrived(self) -> frozenset[int]:
        self.number += 1
        for peer, number in list(self.gone.items()):
            if self.number >= number:
                self.of[peer] = PeerProcess(peer)
                self.fresh.add(peer)
                del self.gone[peer]
        return frozenset(self.fresh)

    def leaving(self) -> frozenset[int]:
        return frozenset(self.wants)

    def dismiss(self, peer: int) -> None:
        self.wants.discard(peer)
        self.of[peer] = None
        self.gone[peer] = self.number + BACK_AFTER  # somebody starts it again

    def wait(self, peers: frozenset[int], seconds: float) -> frozenset[int]:
        return peers & self.arrived()

    def close(self) -> None:
        pass
