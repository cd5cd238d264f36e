"""What a process does next about the links of a round: a pure function, as the protocol's `tick`.

Each peer has a slot of its own for a link, and one link of a round counts. `act` gets what was read
of the round, and what time it is; it neither reads nor writes. What it returns is done by
`training.links.adopt`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from parts.volunteers import layout
from parts.volunteers.bodies import MessageRecord
from parts.volunteers.chain.links import Head, RoundLink, SlotContent, Turns
from parts.volunteers.store.patient_store import LONGEST

EARLIER = 2.0  # seconds: the store's times are whole seconds, and one more


@dataclass(frozen=True)
class Adopt:
    """Next, adopt this peer's link, as none comes before it: if it follows from the store."""

    peer: int


@dataclass(frozen=True)
class Put:
    """Next, put the volunteer's link, whose turn it is; it may name these notices."""

    notices: tuple[str, ...]


@dataclass(frozen=True)
class Look:
    """Next, look at once: into all slots of this round, or again at the round before."""

    before: bool = False


@dataclass(frozen=True)
class Wait:
    """Next, wait: nothing is to be done about the round's links, look again later."""


@dataclass(frozen=True)
class End:
    """Next, end: who does not train waits no longer, this is where the links end that follow."""

    step: int  #: The round that is not over.
    wrong: list[str]  #: Why no link of it can ever follow.
    refused: list[str]  #: Links that do not follow, and on which nobody built.
    beyond: list[str]  #: Names of what was signed in later rounds.


Action = Adopt | Put | Look | Wait | End


@dataclass
class RoundRead:
    """What was read of a round's links, to act on. Times of objects are the store's."""

    # ---- The round, and who reads it ----
    step: int
    what: str  # kind of its links: "closed" or "asked"
    head: Head  # the link before them
    settle: int  # seconds after which an object is surely seen
    me: int | None = None  # the volunteer here, unless it was ejected
    ejected: Collection[int] = ()  # whose links do not count
    min_clients: int = 1  # so many peers do not collude
    waits: bool = True  # whether one who looks on waits where the links end
    # ---- What was read so far ----
    turns: Turns | None = None  # in which links count; None as long as nobody has one
    begun: float | None = None  # since when the first turn has surely begun; None: it may not have
    links: dict[int, SlotContent] = field(default_factory=dict)  # what stands in the slots
    refused: dict[int, str] = field(default_factory=dict)  # why a link is refused, in their order
    listed: dict[str, int] = field(default_factory=dict)  # its names, and when each was put
    first_listed: dict[str, float] = field(default_factory=dict)  # when each was listed first
    everywhere: bool = False  # whether all slots were looked into just now
    next_round: int = 0  # when the newest object of the next round was put; 0 without any
    beyond: Sequence[tuple[str, SlotContent]] | None = None  # what comes after; None: not read
    went_on: float | None = None  # when something was seen there first
    goes_back: bool = False  # whether the round before can be looked at again
    doubted: set[int] = field(default_factory=set)  # for whose links that was done

    def signed(self, ejected: Collection[int] = ()) -> dict[int, SlotContent]:
        """Return the round's signed links that are not refused, except those of ejected peers."""
        out = {*ejected, *self.refused}
        return {p: link for p, link in self.links.items() if link.body and p not in out}

    def first(self) -> int | None:
        """Return whose link comes first in the round of those that are known and not refused."""
        if self.turns is None:
            return None
        signed = self.signed(self.ejected)
        ranks = {p: self.turns.rank(p, link.stored.seconds) for p, link in signed.items()}
        in_turn = {peer: rank for peer, rank in ranks.items() if rank is not None}
        return min(in_turn, key=in_turn.__getitem__, default=None)

    def doubts(self) -> set[int]:
        """Return whose links name another one before them, if nobody has looked for that one."""
        signed = self.signed(self.ejected).items() if self.goes_back else ()
        others = {p for p, link in signed if link.body.previous != self.head.sha256}
        return others - self.doubted

    def refused_before(self, now: float) -> list[int]:
        """Return whose refused links come before one that is put now.

        Links of one second come in the order of turns, so one that was seen just now may not.
        """
        return [peer for peer in self.refused if now - self.links[peer].seen > EARLIER]


def act(read: RoundRead, now: float) -> Action:
    """Return what to do next about links; `now` is this machine's clock when it began to read."""
    if read.doubts():
        return Look(before=True)
    first = read.first()
    if first is not None and read.turns is not None:
        if read.turns.is_alone(first, read.links[first].stored.seconds):
            return Adopt(first)
        if not read.everywhere:
            return Look()
        return Adopt(first) if _none_comes_before(read, first, now) else Wait()
    if read.beyond is not None:
        end = _end(read, read.beyond)
        if not end.wrong and not read.waits:
            return end
        if end.wrong and not read.everywhere:
            return Look()
        # what stands in the slots was put before anybody went on, and is seen by then
        if end.wrong and read.went_on is not None:
            return end if now - read.went_on > read.settle else Wait()
    return _in_turn(read, now)


def _none_comes_before(read: RoundRead, peer: int, now: float) -> bool:
    """Return whether no link before a peer's can come to light.

    The time of an object is when its put began, or ended. So it takes as long to be seen as a put
    takes, for which a run leaves `settle` seconds; this clock says only how long to wait.
    """
    seconds = read.links[peer].stored.seconds
    seen = min(link.seen for link in read.links.values() if link.stored.seconds >= seconds)
    waited = now - seen > read.settle + 1
    newest = max(read.next_round, *read.listed.values(), 0)  # objects that show that it is long ago
    return waited or newest > seconds + read.settle


def _in_turn(read: RoundRead, now: float) -> Action:
    """Put the volunteer's link, once it may act: its turn has begun and no other link is there."""
    if read.me is None or read.me in read.links or read.begun is None or read.turns is None:
        return Wait()
    due = read.begun + read.turns.delay(read.me)
    if now < due:
        return Wait()
    if not read.everywhere:
        return Look()
    kinds = ("join", "leave") if read.what == "closed" else ()
    notices = [n for kind in kinds for n in layout.names_by_peer(read.listed, kind).values()]
    earlier = tuple(name for name in notices if now - read.first_listed[name] > EARLIER)
    if len(earlier) < len(notices) and now - due <= LONGEST + EARLIER:
        return Wait()  # not for ever: the link names none that was put in its own second
    return Put(earlier)


def _end(read: RoundRead, beyond: Sequence[tuple[str, SlotContent]]) -> End:
    """Return what to do where the links end: that nothing came yet, or that none can.

    An honest peer signs an object of a round only once it has followed the links before it. So if a
    link does not follow and others have built on it, or if there is no link and enough peers went
    on, the store is not the one that they saw: what is missing then was changed or removed.
    """
    signers = {content.body.peer for _, content in beyond}
    refused, wrong = [], []
    early = dict.fromkeys(read.signed(), "before its turn, by the messages that are there")
    for peer, reason in (early | read.refused).items():
        text = f"{layout.of_peer(read.step, peer, read.what)}: {reason}"
        builders = {c.body.peer for _, c in beyond if _builds(c, read.links[peer])} - {peer}
        if builders:
            wrong.append(f"{text}; peers {sorted(builders)} went on from it")
        else:
            refused.append(f"{text}; nobody else went on from it")
    if not wrong and len(signers) >= read.min_clients:
        wrong.append(
            f"{layout.round_folder(read.step)}: no link follows, expected one, since peers "
            f"{sorted(signers)} went on: {beyond[0][0]}"
        )
    return End(read.step, wrong, refused, [name for name, _ in beyond])


def _builds(content: SlotContent, link: SlotContent) -> bool:
    """Return whether a record or a link follows from a link."""
    if isinstance(content.body, MessageRecord):
        return isinstance(link.body, RoundLink) and content.body.base == link.body.params
    return content.body.previous == link.sha256
