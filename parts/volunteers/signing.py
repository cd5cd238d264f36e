"""Which rounds the lab signs addresses of, for the hours ahead."""

import math

from parts.volunteers import slots
from parts.volunteers.store.verbs import Seen, Store

HOUR = 3600
RECENT = 32  # rounds of which the pace is taken
SPARE = 1.25  # times as many rounds, since rounds may become shorter
FIRST = 1  # the number of the first round


def rounds_ahead(store: Store, hours: float, longest: float) -> range:
    """Return the rounds that may begin in so many hours from now on, by the pace of the last ones.

    Args:
      store: The run's.
      hours: How long.
      longest: Seconds that a round takes at most, which are taken of a run that has just begun.
    """

    def closed(step: int) -> Seen | None:
        return store.look(slots.link(step, "closed", 0), 0)

    first = FIRST + slots.count(lambda number: closed(FIRST + number) is not None)
    begun, seconds = max(FIRST, first - 1 - RECENT), longest
    if begun < first - 1:
        seconds = (closed(first - 1).seconds - closed(begun).seconds) / (first - 1 - begun)
    count = SPARE * hours * HOUR / max(1.0, min(seconds, longest))
    return range(first, first + max(1, math.ceil(count)))
