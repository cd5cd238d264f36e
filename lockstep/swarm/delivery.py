"""The exchange of a round: turns peers' results into bytes, and says who receives them and when."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lockstep.optim.optimizer import Tree
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from lockstep.protocol.round import Round
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.outbox import Packed
from lockstep.swarm.peers import Done
from lockstep.swarm.round_settings import RoundSettings
from lockstep.wire import bound, exchange
from lockstep.wire import message as wire
from lockstep.wire.exchange import Sent


class Delivered(NamedTuple):
    """The outcome of sending a round's messages, by sender.

    sent: The bytes that went to everyone. others: An equivocator's other bytes. receivers: Who got
      those. received: What the bytes decode to, where receivers accept them. arrivals: Seconds from
      the round's start until a message is at every peer that is present; lost ones are absent.
    """

    sent: dict[int, Sent]
    others: dict[int, Sent]
    receivers: dict[int, tuple[int, ...]]
    received: dict[int, Tree]
    arrivals: dict[int, float]


class Delivery(Protocol):
    """How messages get from their senders to all peers."""

    def deliver(self, done: Mapping[int, Done], round_: Round, present: Sequence[int]) -> Delivered:
        """Deliver the peers' `Packed` messages, as bytes, to all present peers."""


@dataclass(frozen=True)
class SimulatedDelivery:
    """Messages that are encoded, perhaps tampered with, and decoded here; links are simulated.

    Everybody applies what decoding the bytes gives, the sender too.
    """

    settings: RoundSettings
    programs: Programs
    faults: FaultSchedule
    timed: Callable[[str], AbstractContextManager[None]]

    def deliver(self, done: Mapping[int, Done], round_: Round, present: Sequence[int]) -> Delivered:
        """Deliver the peers' `Packed` messages, as bytes, to all present peers."""
        form, step = self.programs.form, round_.step
        with self.timed("encode"):
            packed: dict[int, Packed] = {peer: one.message for peer, one in done.items()}
            true = {peer: one.message for peer, one in packed.items()}
            messages = self.faults.messages(true, step)
            sent = {
                p: packed[p].sent if m is true[p] else exchange.send(m, p, round_, form)
                for p, m in messages.items()
            }
            sent, others, receivers = self.faults.tamper(sent, messages, round_)
        with self.timed("decode"):
            received, sizes = {}, {}
            for peer, one in sent.items():
                if one is packed[peer].sent:
                    received[peer], sizes[peer] = packed[peer].message, packed[peer].largest
                    continue
                try:
                    received[peer] = exchange.receive(one, peer, round_, form)
                except wire.WireError:
                    continue
                sizes[peer] = bound.largest(received[peer])
            for peer in bound.beyond(sizes):
                del received[peer]
        if self.settings.on_wall_clock:
            arrivals = {peer: done[peer].seconds for peer in sent}
        else:
            arrivals = self._arrivals(sent, round_, present)
        return Delivered(sent, others, receivers, received, self.faults.delay(arrivals, step))

    def _arrivals(
        self, sent: Mapping[int, Sent], round_: Round, present: Sequence[int]
    ) -> dict[int, float]:
        """Return the simulated seconds until each message is at every peer, without faults."""
        tokens = {peer: round_.sequences[peer] * self.settings.row_tokens for peer in sent}
        sizes = {peer: len(one.payload) for peer, one in sent.items()}
        overlapped = self.programs.optimizer.overlapped
        return links.arrivals(self.settings.links, present, tokens, sizes, overlapped)
