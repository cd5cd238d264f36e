"""What the lab does now and then: it signs all peers' addresses of the rounds ahead."""

import math
from collections.abc import Collection

from lockstep.errors import LockstepError
from parts.volunteers import slots
from parts.volunteers.addresses.ahead import AddressReader, sign_ahead
from parts.volunteers.chain.admissions import Admissions
from parts.volunteers.chain.opening import read_run
from parts.volunteers.keys import PrivateKey, public_text
from parts.volunteers.store.verbs import Store

HOUR = 3600
RECENT = 32  # rounds of which the pace is taken
SPARE = 1.25  # times as many rounds, since rounds may become shorter
FIRST = 1  # the number of the first round


def closed(store: Store, step: int) -> int | None:
    """Return when the first link of a round was put."""
    names = store.names(slots.round_folder(step))
    return min((names[name] for name in slots.of_kind(names, "closed").values()), default=None)


def closed_rounds(store: Store) -> int:
    """Return how many rounds of a run have a link, from the first on."""
    return slots.count(lambda number: closed(store, FIRST + number) is not None)


def rounds_ahead(store: Store, hours: float, longest: float, last: int) -> range:
    """Return the rounds that may begin in so many hours from now on, by the pace of the last ones.

    Args:
      store: The run's.
      hours: How long.
      longest: Seconds that a round takes at most, which are taken of a run that has just begun.
      last: The run's last round.
    """
    first = FIRST + closed_rounds(store)
    begun, seconds = max(FIRST, first - 1 - RECENT), longest
    if begun < first - 1:
        seconds = (closed(store, first - 1) - closed(store, begun)) / (first - 1 - begun)
    count = SPARE * hours * HOUR / max(1.0, min(seconds, longest))
    return range(first, min(first + max(1, math.ceil(count)), last + 1))


def sign_run(store: Store, lab: PrivateKey, hours: float, peers: Collection[int] = ()) -> str:
    """Sign addresses of the rounds of so many hours, and say of which.

    Args:
      store: The run's.
      lab: The lab's key.
      hours: How long, from now on.
      peers: Whose they are; without any, those of all who have a slot.

    Raises:
      LockstepError: the run is another's, or no addresses of this store can be signed.
    """
    document, run, _ = read_run(store)
    if public_text(lab) != document.lab:
        raise LockstepError(f"{store.address}: the run of {document.lab}, expected your key's")
    admissions = Admissions(store, run, lab.public_key(), document.slots)
    admissions.read()
    found = ((peer, admissions.newest(peer)) for peer in range(document.slots))
    readers = [
        AddressReader.of(peer, key, run, document)
        for peer, key in found
        if key is not None and peer in (peers or range(document.slots))
    ]
    config = document.run["config"]
    steps = rounds_ahead(store, hours, config["max_round_train_time"], config["total_steps"])
    if readers and steps:
        sign_ahead(store, readers, steps, math.ceil(hours * HOUR), lab)
    return f"rounds {steps.start} to {steps.stop - 1} of {len(readers)} peers, for {hours:g} hours"
