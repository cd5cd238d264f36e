"""A drawn peer puts what it owned at both ends of its window, from its disk, while it trains on."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.transcript.transcript import Transcript
from parts.volunteers import chunks, slots
from parts.volunteers.audits.draws import AuditDraw
from parts.volunteers.chain.place import Waits
from parts.volunteers.store.verbs import Store
from pipeline.net.limits import UnreachableError

log = logging.getLogger(__name__)


class Showing:
    """Puts a peer's own states into the store, one after the other.

    What it owned after round `start`, before the first one, is known to all.
    """

    def __init__(self, store: Store, peer: int, transcript: Path, start: int):
        self.store, self.peer, self.start = store, peer, start
        self.transcript = Transcript(transcript)
        self._futures = dict[tuple[int, int], Future[None]]()
        self._thread = ThreadPoolExecutor(1, "audit")

    def begin(self, drawn: AuditDraw) -> None:
        """Begin to put what the peer owned before a window and after it, unless that has begun."""
        for step in (drawn.first - 1, drawn.last):
            key = step, drawn.peer
            if drawn.peer == self.peer and step != self.start and key not in self._futures:
                self._futures[key] = self._thread.submit(self._put, step)

    def wait(self) -> None:
        """Wait until all is there."""
        for future in self._futures.values():
            future.result()

    def _put(self, step: int) -> None:
        if not self.transcript.has_own(step, self.peer):  # it began anew within the window
            return
        path, folder = self.transcript.own_file(step, self.peer), slots.own_folder(step, self.peer)
        waits = Waits()
        while True:
            try:
                chunks.put(self.store, folder, path)
            except UnreachableError:
                waits.sleep(at_once=False)
            except LockstepError as error:  # it costs the slot, and no round
                log.warning(f"train: what an audit asks for is not put: {error}")
                return
            else:
                return
