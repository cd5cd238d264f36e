"""The chain of a run's links: what a link must say, and when it may come.

Everything of a link follows from the link before it and from what the store shows of the round, so
that everybody comes to the same. Times are the store's, in whole seconds; nobody's clock decides.
Nothing here reads or writes.

Each peer has a slot of its own for a link, and they take turns: a link counts if it was put after
its peer's turn began. Among those that follow the first counts, and of one second the one whose
turn came first.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from lockstep.protocol import driver
from lockstep.protocol.attestation import Hash
from lockstep.protocol.committee import deterministic_shuffle, round_seed
from lockstep.protocol.driver import RunProgress
from lockstep.protocol.round import Round
from lockstep.tables.table import AsKey, AsTuple, Table
from parts.volunteers.bodies import Reason, SlotBody, SlotNumber
from parts.volunteers.chain.payloads import WITHHELD, MessageInTime, Refused
from parts.volunteers.store.verbs import StoredObject

Slots, SlotKey = Annotated[tuple[SlotNumber, ...], AsTuple], Annotated[SlotNumber, AsKey]
Shown = Mapping[int, MessageInTime | Refused]
"""What the store shows of a round: the records that count, by peer."""


class LinkedMessage(Table):
    """A message that stands in a link."""

    commitment: Hash
    """Commitment to it."""
    bytes: Annotated[int, Field(ge=0)]
    """Its size."""
    seconds: Annotated[int, Field(ge=0)]
    """When its record and its payload were there, after the link before."""
    record: Hash
    """SHA-256 of the record."""


class LinkedRejection(Table):
    """A record that counts in a link, and whose message does not."""

    reason: Reason
    """Why."""
    record: Hash
    """SHA-256 of the record."""


class AskedLink(SlotBody):
    """A link, rounds/00000123/007.asked: who takes part, if the run waited for members."""

    kind = slot = "asked"
    previous: Hash
    """SHA-256 of the link before it; the first link has that of run.json."""
    asked: Slots
    """Who asked to take part, ascending."""


class RoundLink(SlotBody):
    """A link, rounds/00000123/007.closed: a round is over."""

    kind, slot = "link", "closed"
    previous: Hash
    """SHA-256 of the link before it."""
    asked: Slots
    """Who asked in the round to take part, ascending."""
    left: Slots
    """Who left in it, ascending."""
    messages: dict[SlotKey, LinkedMessage]
    """The messages that are in time, by peer."""
    rejected: dict[SlotKey, LinkedRejection]
    """The records whose message does not count, by peer."""
    false_links: Slots
    """Who signed refused links, as far as they were seen, ascending."""
    applied: Slots
    """Whose messages are merged."""
    params: Hash
    """Hash of the params after it."""
    shared: Hash
    """Hash of the shared state after it."""
    state: Hash | None
    """SHA-256 of the index of both in a file, which its peer puts below `states/`; null where no
    snapshot is."""


@dataclass(frozen=True)
class SlotContent:
    """What stands in a slot of a round: a link, a record or a notice.

    body: None unless the slot's peer signed it for this slot.
    seen: When this process saw it first, by its own clock; who waits for links notes it.
    """

    stored: StoredObject
    body: Any = None
    seen: float = 0.0

    @property
    def sha256(self) -> Hash:
        """SHA-256 of a link's or another slot's bytes, hex."""
        return self.stored.sha256


class FalseLinkError(ValueError):
    """A link that does not follow; everybody refuses it."""


@dataclass(frozen=True)
class Terms:
    """What decides when a round's link may come, in seconds."""

    limit: float  # `Closing.limit`
    settle: int  # `[volunteers] settle_seconds`
    extra: float  # waiting_for_members_extra_time
    turn: float  # from one peer's turn to put a link to the next

    def is_over(self, seconds: int) -> bool:
        """Return whether a link may close a round then without the messages that it lacks."""
        return seconds >= self.limit + self.settle


@dataclass(frozen=True)
class Head:
    """The newest link of a chain."""

    sha256: Hash  # of its bytes; before the first link, of run.json
    seconds: int  # when it was put, by the store's clock
    asked: tuple[int, ...] = ()  # who asked in its round, and takes part later
    owed: tuple[int, ...] = ()  # who signed refused links that it does not name: the next must


def linked(shown: Shown) -> tuple[dict[int, LinkedMessage], dict[int, LinkedRejection]]:
    """Return what a link says of the records that the store shows."""
    messages, rejected = {}, {}
    for peer, verdict in sorted(shown.items()):
        if isinstance(verdict, Refused):
            rejected[peer] = LinkedRejection(reason=verdict.reason, record=verdict.record)
        else:
            messages[peer] = LinkedMessage(
                commitment=verdict.body.commitment,
                bytes=verdict.body.bytes,
                seconds=verdict.seconds,
                record=verdict.record,
            )
    return messages, rejected


def is_whole(round_: Round, shown: Shown) -> bool:
    """Return whether a link can close a round early: no assigned peer's message can still come."""
    changes = any(map(may_change, shown.values()))
    return shown.keys() >= round_.assignment.keys() and not changes


def may_change(verdict: MessageInTime | Refused) -> bool:
    """Return whether the store may show a link other bytes later: a payload that is not there."""
    return isinstance(verdict, Refused) and verdict.reason == WITHHELD


def check_link(  # noqa: PLR0913
    link: RoundLink,
    head: Head,
    round_: Round,
    shown: Shown,
    *,
    joins: Collection[int],
    leaves: Collection[int],
    refused: Collection[int],
) -> None:
    """Check all of a link that came in its turn, except the outcome of its merge.

    Args:
      link: Signed by its slot's peer.
      head: The link before it.
      round_: The round that it closes.
      shown: The records of the round that count.
      joins: Who asked in the round.
      leaves: Who said in it that it leaves.
      refused: Who signed links of the round that come before it, and are refused. It may not have
        seen them all: the next round's link must name the others.

    Raises:
      FalseLinkError: It does not follow.
    """
    _check_place(link, head, round_.step)
    claims, expected = (link.messages, link.rejected), linked(shown)
    if claims != expected:
        peers = {peer for part in (*claims, *expected) for peer in part}
        both = [*zip(claims, expected, strict=True)]
        wrong = [p for p in sorted(peers) if any(a.get(p) != b.get(p) for a, b in both)]
        raise FalseLinkError(f"messages of peers {wrong} differ from those in the store")
    seen = {*link.false_links} & {*refused}
    for what, actual, expected in (
        ("asked", link.asked, sorted({*link.asked}.intersection(joins))),
        ("left", link.left, sorted({*link.left}.intersection(leaves))),
        ("false_links", link.false_links, sorted(seen.union(head.owed))),
    ):
        if [*actual] != expected:
            raise FalseLinkError(f"{what} is {[*actual]}, expected {expected}")


def check_outcome(
    link: RoundLink,
    applied: Sequence[int],
    hashes: tuple[Hash, Hash, Hash | None],
    after: RunProgress,
) -> None:
    """Check a link's outcome of its merge, and that who asked may take part after it."""
    for what, actual, expected in (
        ("applied", link.applied, tuple(applied)),
        *zip(
            ("params", "shared", "state"),
            (link.params, link.shared, link.state),
            hashes,
            strict=True,
        ),
        ("asked", link.asked, driver.may_ask(after, link.asked)),
    ):
        if actual != expected:
            raise FalseLinkError(f"{what} is {actual}, expected {expected}")


def check_asked(
    link: AskedLink,
    head: Head,
    progress: RunProgress,
    joins: Collection[int],
    must: Collection[int],
) -> RunProgress:
    """Return a run that waited for members, with those that a link lists.

    Args:
      link: Signed by its slot's peer, and put in its turn.
      head: The link before it.
      progress: The run.
      joins: Who asked.
      must: Those of them whom it must list.

    Raises:
      FalseLinkError: It does not follow.
    """
    _check_place(link, head, progress.state.step)
    able = driver.may_ask(progress, sorted({*link.asked, *must}.intersection(joins)))
    if link.asked != able:
        raise FalseLinkError(f"asked is {[*link.asked]}, expected {[*able]}")
    return driver.ask(progress, link.asked)


def _check_place(link: RoundLink | AskedLink, head: Head, step: int) -> None:
    if (link.round, link.previous) != (step, head.sha256):
        raise FalseLinkError(
            f"follows {link.previous[:12]} in round {link.round}, expected {head.sha256[:12]} in "
            f"{step}"
        )


# ---- Whose turn it is to put one ----


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
