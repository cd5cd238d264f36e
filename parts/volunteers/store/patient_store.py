"""A store whose requests are repeated until it answers."""

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from parts.volunteers.store.verbs import MOST_NAMES, AwaitedError, MissedError, Store, StoredObject
from pipeline.net.limits import UnreachableError
from pipeline.stage import signals

log = logging.getLogger(__name__)

LONGEST = 5.0  # seconds between two looks at a store, at most
Got = TypeVar("Got")


class Waits:
    """Waits between two looks at a store, each longer than the one before, in seconds."""

    def __init__(self, first: float = 0.05):
        self.next = max(0.05, first)

    def sleep(self, *, at_once: bool = True) -> None:
        """Wait for the store; a request to stop this process is obeyed at once, or not."""
        with signals.at_once() if at_once else nullcontext():
            time.sleep(self.next)
        self.next = min(1.5 * self.next, LONGEST)


class PatientStore:
    """The verbs of a store, for as long as it takes the store to answer."""

    def __init__(self, store: Store):
        self.store, self.address = store, store.address

    def look(self, name: str, most: int) -> StoredObject | None:
        """Look at an object until the store answers."""
        return self.patiently(lambda: self.store.look(name, most))

    def names(self, prefix: str, most: int = MOST_NAMES) -> dict[str, int]:
        """List the objects of a folder, each with its time in seconds, until the store answers."""
        return self.patiently(lambda: self.store.names(prefix, most))

    def put(self, name: str, content: bytes) -> bool:
        """Put an object under a free name until the store answers; return whether it stands there.

        Where the lab signed no address yet, this waits for one. It is too late, and the bytes are
        not there, once the lab signed for later rounds alone.
        """
        try:
            return self.patiently(lambda: self.store.create(name, content))
        except MissedError:
            return False

    def patiently(self, ask: Callable[[], Got], *, at_once: bool = True) -> Got:
        """Repeat a request until the store answers; `at_once` is that of `Waits.sleep`."""
        waits, warned = Waits(), False
        while True:
            try:
                return ask()
            except UnreachableError as error:  # it may stop for a while
                if isinstance(error, AwaitedError) and not warned:
                    log.warning(f"train: waits until the lab signs more: {error}")
                    warned = True
                waits.sleep(at_once=at_once)
