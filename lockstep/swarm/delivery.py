"""The messages of a round: packed while others train, and brought to every peer.

A message is `Packed` where it was made, `Sent` by its peer, and `Delivered` to all.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import NamedTuple

import jax
import numpy as np

from lockstep.machine import cores
from lockstep.optim.optimizer import Tree
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from lockstep.protocol.driver import RoundSettings
from lockstep.protocol.round import Round
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import StepResult
from lockstep.wire import bound, exchange
from lockstep.wire import message as wire
from lockstep.wire.exchange import Asked, Sent
from lockstep.wire.facts import MessageFacts


class Packed(NamedTuple):
    """A message that is being packed for its delivery."""

    make: Callable[[], Sent]  # waits for what was asked of it; raises a `WireError`
    message: Tree = None  # where it was made, if it stays there

    def sent(self, facts: MessageFacts | None, form: wire.Form) -> Sent:
        """Return what a packed message's peer sends; `facts` are those on the host.

        Raises:
          WireError: The message is invalid.
        """
        if facts is None:
            return self.make()
        if not np.isfinite(facts.largest):
            raise wire.NotFiniteValueError("a value is not finite")
        size = form.bytes_most - int(facts.saved)
        return self.make()._replace(largest=float(facts.largest), counted=size)


@dataclass(frozen=True)
class Outbox:
    """The threads that pack messages: they make what is asked of a training's messages."""

    programs: Programs
    asked: Asked = Asked.BYTES
    # whether messages are too large for memory, and where they are stored then; None is the
    # system's folder of temporary files
    large: bool = False
    folder: Path | None = None
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(cores.count(), "outbox")
    )
    _one_large: Semaphore = field(default_factory=lambda: Semaphore(1))  # on the host at a time

    def put(self, message: Tree, peer: int, round_: Round) -> Packed:
        """Begin to pack a peer's message: to make what is asked of it.

        Waits for nothing, but with a large message for it, and for the one before it to be on disk;
        the caller lets go of it. A message that was made here is one, unless a step came to NaN;
        another process may send anything of its shape, so its bytes are read as a stranger's.
        """
        if self.large:
            jax.block_until_ready(message)
            self._one_large.acquire()
            arrays = jax.device_get(jax.tree.leaves(message))
            return Packed(self._threads.submit(self._spool, arrays, peer, round_).result)
        if not isinstance(jax.tree.leaves(message)[0], jax.Array):  # it was made elsewhere
            return Packed(self._threads.submit(self._read, message, peer, round_).result)
        if self.asked == Asked.FACTS:
            return Packed(partial(Sent, None, b"", message=message), message)
        return Packed(self._threads.submit(self._make, message, peer, round_).result, message)

    def _make(self, message: Tree, peer: int, round_: Round) -> Sent:
        arrays = jax.device_get(message)
        if self.asked == Asked.BYTES:
            return exchange.send(arrays, peer, round_, self.programs.form)._replace(message=message)
        return Sent(None, exchange.commit(arrays, peer, round_), message=message)

    def _read(self, message: Tree, peer: int, round_: Round) -> Sent:
        form = self.programs.form  # what bytes decode to is what was encoded: it was committed to
        return exchange.decoded(exchange.send(message, peer, round_, form), form)

    def _spool(self, arrays: list[np.ndarray], peer: int, round_: Round) -> Sent:
        try:
            sent = exchange.send_spooled(arrays, peer, round_, self.programs.form, self.folder)
        finally:
            self._one_large.release()
        return exchange.decoded(sent, self.programs.form)


class Delivered(NamedTuple):
    """The outcome of delivering a round's messages, by sender."""

    sent: dict[int, Sent]  # what went to everyone
    others: dict[int, Sent]  # what an equivocator sent to others
    receivers: dict[int, tuple[int, ...]]  # the peers that get it
    received: dict[int, Tree]  # the messages that receivers accept
    # seconds from the round's start until a message is at every present peer; of lost ones, none
    arrivals: dict[int, float]


@dataclass(frozen=True)
class SimulatedDelivery:
    """A delivery over simulated links: messages are perhaps tampered with, then decoded.

    Everybody applies what decoding the bytes gives, the sender too: of honest bytes, its message.
    """

    settings: RoundSettings
    programs: Programs
    faults: FaultSchedule
    timed: Callable[[str], AbstractContextManager[None]]
    #: By peer, when it has trained what it was assigned, and when its last message has left it,
    #: where rounds close without it; seconds since the start of the run.
    free: dict[int, tuple[float, float]] = field(default_factory=dict)

    def deliver(
        self,
        results: Mapping[int, StepResult[Sent]],
        round_: Round,
        present: Sequence[int],
        now: float,
    ) -> Delivered:
        """Deliver the messages of peers, as bytes, to all that are present.

        `now` is when the round began, seconds since the start of the run.
        """
        form, step = self.programs.form, round_.step
        with self.timed("encode"):
            sent, others, receivers = self.encoded(results, round_)
        with self.timed("decode"):
            arrived = {}
            for peer, packet in sent.items():
                with suppress(wire.WireError):
                    honest = packet is results[peer].message
                    arrived[peer] = (
                        packet if honest else exchange.receive(packet, peer, round_, form)
                    )
            beyond = bound.beyond({peer: packet.largest for peer, packet in arrived.items()})
            received = {p: packet.message for p, packet in arrived.items() if p not in beyond}
        if self.settings.links.computed:
            arrivals = self._arrivals(sent, round_, present, now)
        else:
            arrivals = {peer: results[peer].seconds for peer in sent}
        return Delivered(sent, others, receivers, received, self.faults.delay(arrivals, step))

    def encoded(
        self, results: Mapping[int, StepResult[Sent]], round_: Round
    ) -> tuple[dict[int, Sent], dict[int, Sent], dict[int, tuple[int, ...]]]:
        """Return what peers deliver, honest or not; equivocators' other messages; receivers."""
        true = {peer: result.message.message for peer, result in results.items()}
        messages = self.faults.messages(true, round_.step)
        sent = {
            p: results[p].message
            if m is true[p]
            else exchange.send(m, p, round_, self.programs.form)
            for p, m in messages.items()
        }
        return self.faults.tamper(sent, messages, round_)

    def _arrivals(
        self, sent: Mapping[int, Sent], round_: Round, present: Sequence[int], now: float
    ) -> dict[int, float]:
        """Return the simulated seconds until each message is at every peer, without faults.

        A peer that a round did not wait for begins the next one when it is done with its work, and
        sends one message after the other.
        """
        tokens = {peer: round_.sequences[peer] * self.settings.row_tokens for peer in sent}
        sizes = {peer: packet.size for peer, packet in sent.items()}
        overlapped = self.programs.optimizer.overlapped
        arrivals = links.arrivals(self.settings.links, present, tokens, sizes, overlapped)
        if self.settings.closing.waits_for_all:
            return arrivals
        for peer, size in sizes.items():
            train, send = links.own_seconds(self.settings.links, peer, tokens[peer], size)
            lag, sending = (max(0.0, at - now) for at in self.free.get(peer, (now, now)))
            due = (1.0 - overlapped) * train
            departure = max(lag + due, sending)
            arrivals[peer] += departure - due
            self.free[peer] = now + lag + train, now + departure + send
        return arrivals
