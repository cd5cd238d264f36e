"""What the lab does now and then: it signs all peers' addresses of the rounds ahead."""

import math
from collections.abc import Collection, Mapping
from statistics import median
from typing import Any

from parts.volunteers import slots
from parts.volunteers.addresses.ahead import AddressReader, sign_ahead
from parts.volunteers.chain.admissions import Admissions
from parts.volunteers.chain.opening import read_own
from parts.volunteers.keys import PrivateKey
from parts.volunteers.store.verbs import Store

HOUR = 3600
RECENT = 32  # rounds whose pace is taken
SPARE = 1.25  # times as many rounds, since rounds may become shorter
FIRST = 1  # the number of the first round
MOST_NAMES = 10**7  # of a round's folder, which somebody may have filled


def times_put(store: Store, step: int, what: str = "closed") -> list[int]:
    """Return when peers put their links or their records of a round, ascending."""
    names = store.names(slots.round_folder(step), MOST_NAMES)
    return sorted(names[name] for name in slots.names_by_peer(names, what).values())


def rounds_with_links(store: Store) -> int:
    """Return how many rounds have a link, from the first on: no fewer than are over.

    A peer can put a link into each round whose addresses it has.
    """
    return slots.count(lambda number: bool(times_put(store, FIRST + number)))


def rounds_over(store: Store, senders: int) -> int:
    """Return how many rounds are over: each has a link, and `senders` peers sent messages next.

    It is sure as long as fewer than these collude.
    """

    def is_over(number: int) -> bool:
        sent = times_put(store, FIRST + number + 1, "record")
        return len(sent) >= senders and bool(times_put(store, FIRST + number))

    return slots.count(is_over)


def rounds_ahead(store: Store, hours: float, config: Mapping[str, Any]) -> range:
    """Return the rounds that may begin in so many hours from now on, by the pace of the last ones.

    Args:
      store: The run's.
      hours: How long.
      config: The run's table: its rounds are `total_steps`, one takes `max_round_train_time` at
        most, which is taken of a run that has just begun, and one with fewer messages than
        `min_clients` does not show that those before it are over.
    """
    longest = config["max_round_train_time"]
    first = FIRST + rounds_over(store, config["min_clients"])
    newest = max(first, FIRST + rounds_with_links(store))
    start, seconds = max(FIRST, first - 1 - RECENT), longest
    if start < first - 1:
        # the median, since a peer can put its own as early or late as it likes
        times = [median(times_put(store, step + 1, "record")) for step in (start, first - 1)]
        seconds = (times[1] - times[0]) / (first - 1 - start)
    count = SPARE * hours * HOUR / max(1.0, min(seconds, longest))
    return range(first, min(newest + max(1, math.ceil(count)), config["total_steps"] + 1))


def sign_run(store: Store, lab: PrivateKey, hours: float, peers: Collection[int] = ()) -> str:
    """Sign addresses of the rounds of so many hours from now on, and say of which.

    Without `peers` they are those of all who have a slot.

    Raises:
      LockstepError: the run is another's, or no addresses of this store can be signed.
    """
    document, run = read_own(store, lab)
    admissions = Admissions(store, run, lab.public_key(), document.slots)
    admissions.read()
    holders = ((peer, admissions.newest(peer)) for peer in range(document.slots))
    readers = [
        AddressReader.of(peer, key, run, document)
        for peer, key in holders
        if key is not None and peer in (peers or range(document.slots))
    ]
    steps = rounds_ahead(store, hours, document.run["config"])
    if readers and steps:
        sign_ahead(store, readers, steps, math.ceil(hours * HOUR), lab)
    return f"rounds {steps.start} to {steps.stop - 1} of {len(readers)} peers, for {hours:g} hours"
