"""The links in the slots of a round, and which of them counts."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from parts.volunteers import slots
from parts.volunteers.chain.links import FalseLinkError
from parts.volunteers.chain.place import LinkInSlot, RunInStore
from parts.volunteers.chain.turns import Turns

EARLIER = 2.0  # seconds: one more than those in which times are told
Followed = TypeVar("Followed")


@dataclass
class Slate:
    """What stands in the slots for links of a round.

    Attributes:
      what: Its name's end: "closed" or "asked".
      step: The round.
      at: When a peer must have had its slot, by the store's clock; None: when it put its link.
      refused: Who signed a link that everybody refuses, in the order in which they count, and why.
    """

    place: RunInStore
    what: str
    step: int
    at: int | None = None
    refused: dict[int, str] = field(default_factory=dict)
    _links: dict[int, LinkInSlot] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)  # when it was first seen here
    _listed: dict[str, float] = field(default_factory=dict)  # when a name was first listed here

    def read(self, peers: Iterable[int]) -> None:
        """Look into the slots of some peers, as far as nothing was found there before."""
        for peer in peers:
            if self.has(peer):
                continue
            entry = self.place.signed_in(slots.of_peer(self.step, peer, self.what), self.at)
            if entry is not None:
                self._links[peer], self._since[peer] = entry, time.monotonic()

    def list(self) -> dict[str, int]:
        """Look into all slots; return the names of the round, and when each was put."""
        names, now = self.place.names(self.step), time.monotonic()
        self._listed = dict.fromkeys(names, now) | self._listed
        self.read(slots.names_by_peer(names, self.what))
        return names

    def earlier(self, names: Iterable[str]) -> Sequence[str]:
        """Return those of listed names whose objects came before a link that is put now."""
        now = time.monotonic()
        return [name for name in names if now - self._listed[name] > EARLIER]

    def entry(self, peer: int) -> LinkInSlot:
        """Return what stands in a peer's slot, which is filled."""
        return self._links[peer]

    def has(self, peer: int) -> bool:
        """Return whether a peer's slot is filled."""
        return peer in self._links

    def refused_earlier(self) -> Sequence[int]:
        """Return whose refused links come before one that is put now.

        Links of one second come in the order of turns, so one that was seen just now may not.
        """
        now = time.monotonic()
        return [peer for peer in self.refused if now - self._since[peer] > EARLIER]

    def signed(self, ejected: Collection[int]) -> dict[int, LinkInSlot]:
        """Return the signed links that may count; peers that were ejected have none."""
        out = {*ejected, *self.refused}
        return {p: entry for p, entry in self._links.items() if entry.link and p not in out}

    def first(self, turns: Turns, ejected: Collection[int]) -> int | None:
        """Return whose link comes first of those that are known and not refused."""
        signed = self.signed(ejected)
        ranks = {p: turns.rank(p, entry.stored.seconds) for p, entry in signed.items()}
        in_turn = {peer: rank for peer, rank in ranks.items() if rank is not None}
        return min(in_turn, key=in_turn.__getitem__, default=None)

    def choose(
        self,
        turns: Turns,
        ejected: Collection[int],
        follows: Callable[[Any, int], Followed],
        *,
        is_over: bool = False,
    ) -> tuple[LinkInSlot, Followed] | None:
        """Return the link that counts, and what `follows` returns for it; None while none does.

        `follows` gets a link, and when it was put. A link that comes first counts once none can
        come before it any more, and at once where it `is_over` anyhow. If it raises a
        FalseLinkError, it is refused, and the next is looked at.
        """
        while (peer := self.first(turns, ejected)) is not None:
            entry = self._links[peer]
            if not is_over and not turns.is_alone(peer, entry.stored.seconds):
                can_count = self._is_over(peer)
                if self.first(turns, ejected) != peer:
                    continue
                if not can_count:
                    return None
            try:
                return entry, follows(entry.link, entry.stored.seconds)
            except FalseLinkError as error:
                self.refused[peer] = str(error)
        return None

    def _is_over(self, peer: int) -> bool:
        """Look into all slots once more; return whether no earlier link can come to light.

        The time of an object is when its put began, or ended. So it takes as long to be seen as a
        put takes, for which a run leaves `settle_seconds`; this clock says only how long to wait.
        """
        settle, seconds = self.place.terms.settle, self._links[peer].stored.seconds
        later = [p for p, entry in self._links.items() if entry.stored.seconds >= seconds]
        waited = time.monotonic() - min(map(self._since.__getitem__, later)) > settle + 1
        if not waited:  # later objects show that it is long ago
            times = self.place.names(self.step + 1).values()
            waited = max(times, default=0) > seconds + settle
        return max(self.list().values(), default=0) > seconds + settle or waited
