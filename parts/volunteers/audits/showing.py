"""A drawn peer puts what it owned at both ends of its window, from its disk, while it trains on."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.protocol.attestation import Hash
from lockstep.transcript.transcript import Transcript
from parts.volunteers import chunks, slots
from parts.volunteers.audits.draws import AuditDraw
from parts.volunteers.bodies import ShownState
from parts.volunteers.chain.place import Volunteer, Waits
from parts.volunteers.signed import sign
from parts.volunteers.store.verbs import Store
from pipeline.net.limits import UnreachableError

log = logging.getLogger(__name__)


class Showing:
    """Puts a peer's own states into the store, one after the other.

    What it owned after round `start`, before the first one, is known to all.
    """

    def __init__(self, store: Store, run: Hash, who: Volunteer, transcript: Path, start: int):
        self.store, self.run, self.start = store, run, start
        self.peer, self.key = who.peer, who.key
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
        index = chunks.name_of(chunks.index_of(path))
        said = ShownState(run=self.run, round=step, peer=self.peer, index=index)
        content = sign(said, self.key, slots.SHOWN_BYTES)
        # signed though others may have put other bytes there, so that it costs no slot
        self._patiently(lambda: chunks.put(self.store, folder, path))
        self._patiently(lambda: self.store.create(slots.of_peer(step, self.peer, "shown"), content))

    def _patiently(self, put: Callable[[], object]) -> None:
        waits = Waits()
        while True:
            try:
                put()
                return
            except UnreachableError:
                waits.sleep(at_once=False)
            except LockstepError as error:  # it costs no round
                log.warning(f"train: what an audit asks for is not put: {error}")
                return
