"""Whose turn it is to put a link. Each peer has a slot of its own for one, and they take turns.

A link counts if it was put after its peer's turn began, by the store's clock. Among those that
follow the first counts, and of one second the one whose turn came first. Nothing here reads or
writes.
"""

import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from lockstep.protocol import driver
from lockstep.protocol.committee import deterministic_shuffle, round_seed
from lockstep.protocol.driver import RunProgress
from lockstep.protocol.round import Round
from parts.volunteers.chain.links import Head, Shown, Terms, is_whole
from parts.volunteers.chain.payloads import MessageInTime


class Turns(NamedTuple):
    """The turns in which peers put links of a round."""

    order: tuple[int, ...]  #: All slots of the run.
    since: int  #: When the first turn begins, by the store's clock.
    length: float  #: Seconds from one turn to the next.

    def delay(self, peer: int) -> float:
        """Return the seconds from the first turn to a peer's own."""
        return self.order.index(peer) * self.length

    def rank(self, peer: int, seconds: int) -> tuple[int, int] | None:
        """Return the key by which links are ordered in turns; None for a link before its peer's."""
        index = self.order.index(peer)
        is_early = seconds < self.since + int(index * self.length)
        return None if is_early else (seconds, index)

    def is_alone(self, peer: int, seconds: int) -> bool:
        """Return whether only this peer's turn had begun at `seconds`."""
        return peer == self.order[0] and seconds < self.since + int(self.length)


def in_order(seed: int, *groups: Collection[int]) -> tuple[int, ...]:
    """Return each peer's turn once: those of the first group, shuffled, then of the next."""
    order = dict[int, None]()
    for group in groups:
        order |= dict.fromkeys(deterministic_shuffle(sorted({*group} - order.keys()), seed))
    return tuple(order)


def turns_to_close(round_: Round, shown: Shown, head: Head, terms: Terms, slots: int) -> Turns:
    """Return the turns in which peers may close a round.

    `shown` are the round's records that the store shows. If all are there, the first turn begins
    when the last one was put, else when the round's time is over. Peers whose message is there come
    first, then the other members, then all other slots of the run.
    """
    since = math.ceil(terms.limit + terms.settle)
    if is_whole(round_, shown):
        since = max((verdict.seconds for verdict in shown.values()), default=0)
    senders = [peer for peer, verdict in shown.items() if isinstance(verdict, MessageInTime)]
    order = in_order(round_.seed, senders, round_.peers, range(slots))
    return Turns(order, head.seconds + since, terms.turn)


def turns_to_begin(
    progress: RunProgress, joins: Mapping[int, int], head: Head, terms: Terms, slots: int
) -> Turns | None:
    """Return the turns in which peers may say who takes part; None if too few have asked.

    `joins` says when each peer asked. The first turn begins in the second after enough have asked,
    and not before others had time to ask.
    """
    for seconds in sorted({*joins.values()}):
        since = max(seconds + 1, head.seconds + math.ceil(terms.extra))
        peers = put_before(since, joins)
        if not driver.ask(progress, driver.may_ask(progress, peers)).waiting:
            seed = round_seed(progress.seed, progress.state.step)
            return Turns(in_order(seed, peers, range(slots)), since, terms.turn)
    return None


def put_before(seconds: float, notices: Mapping[int, int]) -> list[int]:
    """Return whose notice was put before a time, for the turns, ascending."""
    return sorted(peer for peer, at in notices.items() if at < seconds)
