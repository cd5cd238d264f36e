"""The lab signs all peers' addresses of the rounds ahead, as often as it likes."""

import math
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any

from lockstep.errors import LockstepError
from parts.volunteers import layout, signed
from parts.volunteers.chain.statements import Admissions
from parts.volunteers.keys import PrivateKey
from parts.volunteers.lab.opening import read_own
from parts.volunteers.store import sealed
from parts.volunteers.store.addresses import (
    MOST_BYTES,
    MOST_FILES,
    SPAN,
    AddressReader,
    SignedAddresses,
    count_files,
    lists,
    own_puts,
    sealed_in,
    sign_file,
)
from parts.volunteers.store.s3 import LONGEST, S3Endpoint
from parts.volunteers.store.verbs import Store
from parts.volunteers.store.web_store import StoreRequest, WebStore

HOUR = 3600
RECENT = 32  # rounds whose pace is taken
SPARE = 1.25  # times as many rounds, since rounds may become shorter
FIRST = 1  # the number of the first round
MOST_NAMES = 10**7  # of a round's folder, which somebody may have filled


def times_put(store: Store, step: int, what: str = "closed") -> list[int]:
    """Return when peers put links or records of a round, by which the lab signs ahead."""
    names = store.names(layout.round_folder(step), MOST_NAMES)
    return sorted(names[name] for name in layout.names_by_peer(names, what).values())


def rounds_with_links(store: Store) -> int:
    """Return how many rounds have a link, for the lab that signs: no fewer than are over.

    A peer can put a link into each round whose addresses it has.
    """
    return layout.count(lambda number: bool(times_put(store, FIRST + number)))


def rounds_over(store: Store, senders: int) -> int:
    """Return how many rounds are over, for the lab: each has a link, and `senders` sent next.

    It is sure as long as fewer than these collude.
    """

    def is_over(number: int) -> bool:
        sent = times_put(store, FIRST + number + 1, "record")
        return len(sent) >= senders and bool(times_put(store, FIRST + number))

    return layout.count(is_over)


def rounds_ahead(store: Store, hours: float, config: Mapping[str, Any]) -> range:
    """Return the rounds to sign, which may begin in so many hours, by the pace of the last.

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
        AddressReader(peer, key, run, document)
        for peer, key in holders
        if key is not None and peer in (peers or range(document.slots))
    ]
    steps = rounds_ahead(store, hours, document.run["config"])
    if not (readers and steps):
        return "nothing, since nobody has a slot or all rounds are over"
    sign_ahead(store, readers, steps, math.ceil(hours * HOUR), lab)
    return f"rounds {steps.start} to {steps.stop - 1} of {len(readers)} peers, for {hours:g} hours"


def sign_ahead(
    store: Store, readers: Sequence[AddressReader], steps: range, seconds: int, lab: PrivateKey
) -> list[str]:
    """Sign peers' addresses of rounds, and put them into the store; return the files' names.

    Args:
      store: The run's, with the right to sign addresses of it.
      readers: Whose they are, all of one run.
      steps: The rounds.
      seconds: For how long the addresses hold.
      lab: The lab's key.

    Raises:
      LockstepError: no addresses of this store can be signed, or not for so long; or a peer has too
        many files of them.
    """
    if not (isinstance(store, WebStore) and isinstance(store.endpoint, S3Endpoint)):
        raise LockstepError(f"{store.address}: cannot sign addresses, expected s3://BUCKET/FOLDER")
    if not 0 < seconds <= LONGEST:
        raise LockstepError(f"{seconds} s: expected 1 to {LONGEST}, the longest that stores allow")
    endpoint, until, names = store.endpoint, int(time.time()) + seconds, []
    public = lab.public_key()
    numbers = {r.peer: iter(range(count_files(store, r, public), MOST_FILES)) for r in readers}
    for first in range(steps.start, steps.stop, SPAN):
        rounds = range(first, min(first + SPAN, steps.stop))
        common = [ask for step in rounds for ask in lists(readers[0].document.slots, step)]
        common = endpoint.sign([*common, StoreRequest("LIST", layout.ADMISSIONS)], seconds)
        for reader in readers:
            own = endpoint.sign([p for step in rounds for p in own_puts(reader, step)], seconds)
            body = SignedAddresses(
                run=reader.run,
                peer=reader.peer,
                first=first,
                until=until,
                folder=endpoint.folder,
                puts={ask.name: url for ask, url in own.items()},
                lists=tuple((ask.name, ask.after, url) for ask, url in common.items()),
            )
            content = zlib.compress(signed.sign(body, lab))
            for number in numbers[reader.peer]:
                name = layout.addresses(reader.peer, number)
                stored = store.look(name, MOST_BYTES)
                if stored and sealed_in(stored.content, public, reader.run, name) is None:
                    store.remove(name)
                data = sign_file(sealed.seal(content, reader.key, name), lab, reader.run, name)
                if store.create(name, data):  # or another process of the lab was the first
                    names.append(name)
                    break
            else:
                raise LockstepError(
                    f"{store.address}: peer {reader.peer} has {MOST_FILES} files of addresses, "
                    "expected fewer"
                )
    return names
