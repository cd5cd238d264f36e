"""The messages of a round: packed while others train, and brought to every peer.

A message is `Sent` by its peer and `Delivered` as bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Semaphore
from typing import NamedTuple

import jax
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from lockstep.protocol.driver import RoundSettings
from lockstep.protocol.round import Round
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import StepResult
from lockstep.wire import bound, exchange
from lockstep.wire import message as wire
from lockstep.wire.exchange import Sent


@dataclass(frozen=True)
class Outbox:
    """The thread that packs a training's messages, one at a time."""

    form: wire.Form
    # where large messages are stored; None is the system's folder of temporary files
    folder: Path | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "outbox"))
    _one_large: Semaphore = field(default_factory=lambda: Semaphore(1))  # on the host at a time

    def put(self, message: Tree, peer: int, round_: Round) -> Future[Sent]:
        """Take a peer's message to the host, and pack it.

        Waits for the message, and with a large one for the one before it to be on disk. The caller
        lets go of it. The future raises a `WireError` if the message is invalid: a process may
        send anything of its shape, and a step may come to NaN.
        """
        if not self.form.large:
            return self._thread.submit(self._pack, jax.device_get(message), peer, round_)
        jax.block_until_ready(message)
        self._one_large.acquire()
        arrays = jax.device_get(jax.tree.leaves(message))
        return self._thread.submit(self._spool, arrays, peer, round_)

    def _pack(self, message: Tree, peer: int, round_: Round) -> Sent:
        return self._received(exchange.send(message, peer, round_, self.form), peer, round_)

    def _spool(self, arrays: list[np.ndarray], peer: int, round_: Round) -> Sent:
        try:
            sent = exchange.send_spooled(arrays, peer, round_, self.form, self.folder)
        finally:
            self._one_large.release()
        return self._received(sent, peer, round_)

    def _received(self, sent: Sent, peer: int, round_: Round) -> Sent:
        if self.form.kept:
            return exchange.receive(sent, peer, round_, self.form)
        return exchange.decoded(sent, self.form)  # it is large: hashed but once


class Delivered(NamedTuple):
    """The outcome of sending a round's messages, by sender."""

    sent: dict[int, Sent]  # what went to everyone
    others: dict[int, Sent]  # what an equivocator sent to others
    receivers: dict[int, tuple[int, ...]]  # the peers that get it
    received: dict[int, Tree]  # the messages that receivers accept
    # seconds from the round's start until a message is at every present peer; of lost ones, none
    arrivals: dict[int, float]


@dataclass(frozen=True)
class SimulatedDelivery:
    """Messages that are encoded, perhaps tampered with, and decoded here; links are simulated.

    Everybody applies what decoding the bytes gives, the sender too.
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
        """Bring the messages of peers to all that are present, as bytes.

        `now` is when the round began, seconds since the start of the run.
        """
        form, step = self.programs.form, round_.step
        with self.timed("encode"):
            sent, others, receivers = self.encoded(results, round_)
        with self.timed("decode"):
            arrived = {}
            for peer, packet in sent.items():
                with suppress(wire.WireError):
                    honest = packet is results[peer].message  # its peer has decoded it
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
        """Return what peers send, honest or not; equivocators' other messages; their receivers."""
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
        sizes = {peer: len(packet.payload) for peer, packet in sent.items()}
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
