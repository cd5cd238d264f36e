"""States in the store: what all agree on, for late beginners, and what a drawn peer owned."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.protocol.attestation import Hash
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import load_tree, save_tree, tree_hash
from parts.volunteers import layout
from parts.volunteers.bodies import RunDocument, ShownState
from parts.volunteers.chain.draws import AuditDraw
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.signed import sign
from parts.volunteers.store import chunks
from parts.volunteers.store.patient_store import PatientStore
from parts.volunteers.store.verbs import Store
from parts.volunteers.training.process import Volunteer

log = logging.getLogger(__name__)


class States:
    """A run's states in the store, which are written to a folder before they are put."""

    def __init__(self, store: Store, document: RunDocument, folder: Path):
        self.store, self.document, self.folder = store, document, folder
        self._puts = ThreadPoolExecutor(1, "state")  # rounds go on meanwhile

    def write(self, step: int, params: Tree, shared: Tree) -> Hash | None:
        """Write the state after a round for the store, if it is due; return its index's SHA-256."""
        every = self.document.run["witness"]["snapshot_every"]
        if not self.document.state_bytes or step % every:
            return None
        save_tree(path := self._path(step), jax.device_get({"params": params, "shared": shared}))
        return chunks.name_of(chunks.index_of(path))

    def closed(self, link: RoundLink, *, mine: bool) -> None:
        """Put the state that was written into the store, if this volunteer closed its round."""
        if link.state is None:
            return
        if mine:
            self._puts.submit(self._put, link)
        else:
            self._path(link.round).unlink(missing_ok=True)

    def _put(self, link: RoundLink) -> None:
        path = self._path(link.round)
        try:
            chunks.put(self.store, layout.state_folder(link.round, link.peer), path)
        except LockstepError as error:  # later beginners take an older one
            log.warning(f"train: the state after round {link.round} was not put: {error}")
        path.unlink(missing_ok=True)

    def fetch(self, link: RoundLink, params: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Return the params and the shared state after a round, in the structure of others.

        Raises:
          LockstepError: they are not all there, or are not what the link says.
        """
        path, where = self._path(link.round), layout.state_folder(link.round, link.peer)
        chunks.fetch(self.store, where, link.state or "", path, self.document.state_bytes)
        state = load_tree(path, {"params": params, "shared": shared})
        path.unlink()
        hashes = tree_hash(state["params"]), tree_hash(state["shared"])
        if hashes != (link.params, link.shared):
            raise LockstepError(
                f"{where}: the state does not match its link, expected the state with its hashes"
            )
        return state["params"], state["shared"]

    def _path(self, step: int) -> Path:
        return self.folder / f"state-{step:08}.safetensors"


class OwnStates:
    """Puts a peer's own states into the store, one after the other.

    What it owned after round `start`, before the first one, is known to all.
    """

    def __init__(
        self, store: PatientStore, run: Hash, who: Volunteer, transcript: Path, start: int
    ):
        self.store, self.run, self.start = store, run, start
        self.peer, self.key = who.peer, who.key
        self.transcript = Transcript(transcript)
        self._futures = dict[tuple[int, int], Future[None]]()
        self._thread = ThreadPoolExecutor(1, "audit")

    def begin(self, drawn: AuditDraw) -> None:
        """Begin to put a drawn peer's states before and after a window, unless that has begun."""
        for step in (drawn.first - 1, drawn.last):
            key = step, drawn.peer
            if drawn.peer == self.peer and step != self.start and key not in self._futures:
                self._futures[key] = self._thread.submit(self._put, step)

    def wait(self) -> None:
        """Wait until all of a drawn peer's states are in the store."""
        for future in self._futures.values():
            future.result()

    def _put(self, step: int) -> None:
        if not self.transcript.has_own(step, self.peer):  # it began anew within the window
            return
        path, folder = self.transcript.own_file(step, self.peer), layout.own_folder(step, self.peer)
        index = chunks.name_of(chunks.index_of(path))
        said = ShownState(run=self.run, round=step, peer=self.peer, index=index)
        content = sign(said, self.key, layout.SHOWN_BYTES)
        store, name = self.store.store, layout.of_peer(step, self.peer, "shown")
        # signed though others may have put other bytes there, so that it costs no slot
        for put in (lambda: chunks.put(store, folder, path), lambda: store.create(name, content)):
            try:
                self.store.patiently(put, at_once=False)
            except LockstepError as error:  # it costs no round
                log.warning(f"train: what an audit asks for is not put: {error}")
