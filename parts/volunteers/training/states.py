"""What all agree on after some rounds, put into the store for those who begin later."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.protocol.attestation import Hash
from lockstep.transcript.trees import load_tree, save_tree, tree_hash
from parts.volunteers import chunks, slots
from parts.volunteers.bodies import RunDocument
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.store.verbs import Store

log = logging.getLogger(__name__)


class States:
    """States of a run, which are written to a folder before they are put."""

    def __init__(self, store: Store, document: RunDocument, folder: Path):
        self.store, self.document, self.folder = store, document, folder
        self._puts = ThreadPoolExecutor(1, "state")  # rounds go on meanwhile

    def write(self, step: int, params: Tree, shared: Tree) -> Hash | None:
        """Write the state after a round, if it is due; return the SHA-256 of its index."""
        every = self.document.run["witness"]["snapshot_every"]
        if not self.document.state_bytes or step % every:
            return None
        save_tree(path := self._path(step), jax.device_get({"params": params, "shared": shared}))
        return chunks.name_of(chunks.index_of(path))

    def closed(self, link: RoundLink, *, mine: bool) -> None:
        """Put the state that was written, if this volunteer closed its round."""
        if link.state is None:
            return
        if mine:
            self._puts.submit(self._put, link)
        else:
            self._path(link.round).unlink(missing_ok=True)

    def _put(self, link: RoundLink) -> None:
        path = self._path(link.round)
        try:
            chunks.put(self.store, slots.state_folder(link.round, link.peer), path)
        except LockstepError as error:  # later beginners take an older one
            log.warning(f"train: the state after round {link.round} was not put: {error}")
        path.unlink(missing_ok=True)

    def fetch(self, link: RoundLink, params: Tree, shared: Tree) -> tuple[Tree, Tree]:
        """Return the params and the shared state after a round, in the structure of others.

        Raises:
          LockstepError: they are not all there, or are not what the link says.
        """
        path, where = self._path(link.round), slots.state_folder(link.round, link.peer)
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
