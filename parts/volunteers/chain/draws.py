"""Whose windows are audited while a run goes on: everybody draws the same.

When a window has closed, the hash of its last link draws. The first two windows of whoever newly
has a slot are always drawn, and each later one with probability `[volunteers] replay_percent`. The
signer of that link could try signatures until the hash spares it: its own window is always drawn.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

FIRST = 2  # windows of a newcomer that are always drawn
DOMAIN = b"lockstep/audit/1"


class AuditDraw(NamedTuple):
    """A peer's window that was drawn to be audited."""

    peer: int
    number: int  #: The window, counted from 0.
    first: int  #: Its first round.
    last: int  #: Its last round.
    seconds: int  #: When its last link was put, by the store's clock.
    key: str  #: Whose messages it has; "" if the slot changed hands within it.
    signer: int  #: Whose link drew.
    by_chance: bool  #: Whether the link's hash decided; else it is always drawn.


def is_drawn(link: str, peer: int, windows: int, percent: float) -> bool:
    """Return whether the draw falls on the window that a link closes.

    Args:
      link: SHA-256 of the link, hex.
      peer: Whose window.
      windows: In how many windows the slot's key has sent messages, this one included.
      percent: `[volunteers] replay_percent`.
    """
    if windows <= FIRST:
        return True
    digest = hashlib.sha256(b"%s\0%s\0%d" % (DOMAIN, link.encode(), peer)).digest()
    return int.from_bytes(digest[:8], "big") < percent / 100 * 2**64


@dataclass
class AuditDraws:
    """The draws of a run so far."""

    percent: float
    drawn: list[AuditDraw] = field(default_factory=list)
    spared: list[AuditDraw] = field(default_factory=list)
    _senders: dict[int, tuple[str, ...]] = field(default_factory=dict)  # of the open window
    _windows: dict[int, tuple[str, int]] = field(default_factory=dict)  # of a slot's newest key

    def took(self, senders: Mapping[int, str]) -> None:
        """Account for a round in the draws, by the peers' keys whose messages stand in its link."""
        for peer, key in senders.items():
            before = self._senders.get(peer, ())
            self._senders[peer] = before if before[-1:] == (key,) else (*before, key)

    def close(
        self, number: int, rounds: tuple[int, int], link: str, signer: int, seconds: int
    ) -> list[AuditDraw]:
        """Draw which of the windows that a link of `signer` closes are audited."""
        drawn = []
        for peer, (*others, key) in sorted(self._senders.items()):
            last_key, count = self._windows.get(peer, (key, 0))
            self._windows[peer] = key, (count if last_key == key else 0) + 1
            windows = self._windows[peer][1]
            by_chance, key = windows > FIRST and peer != signer, "" if others else key
            one = AuditDraw(peer, number, *rounds, seconds, key, signer, by_chance)
            is_one = not by_chance or is_drawn(link, peer, windows, self.percent)
            (drawn if is_one else self.spared).append(one)
        self._senders.clear()
        self.drawn += drawn
        return drawn

    def to_json(self) -> list[Any]:
        """Return all draws of the run so far, for a checkpoint."""
        draws = [*self.drawn], [*self.spared]
        return [*draws, [*self._senders.items()], [*self._windows.items()]]

    def restore(self, data: list[Any]) -> None:
        """Go on with the draws from a checkpoint."""
        drawn, spared, senders, windows = data
        self.drawn, self.spared = ([AuditDraw(*one) for one in some] for some in (drawn, spared))
        self._senders = {peer: tuple(some) for peer, some in senders}
        self._windows = {peer: (key, count) for peer, (key, count) in windows}
