"""Checkpoints of a training run in progress, from which a killed run resumes.

They go through orbax, which saves in a thread of ours while training goes on. Its own
`save_checkpointables_async` leaves a thread and an event loop behind, three open files, at each
save that is not waited for.
"""

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from lockstep.errors import LockstepError, expecting, first_line
from lockstep.optim.optimizer import Tree
from lockstep.transcript.trees import fitted, flatten, is_blob, tree_hash

log = logging.getLogger(__name__)


class Saved(NamedTuple):
    """A loaded checkpoint of a training."""

    step: int  # the one after which it was saved
    state: Tree  # of params and optimizers
    extras: dict  # everything else that training resumes from, as JSON


class _Unchanged(np.ndarray):
    """An array that nobody writes to, so that a checkpoint's copy of it is itself."""

    def __deepcopy__(self, memo: dict) -> "_Unchanged":
        return self


class Checkpoints:
    """The newest checkpoints of a training run, in a folder.

    Orbax loads a flipped bit without complaint, so each checkpoint carries the hash of its state.
    """

    def __init__(self, folder: Path, keep: int):
        from orbax.checkpoint import v1 as ocp

        for name in ("absl", "asyncio"):  # print tracebacks of what orbax raises too
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.folder = folder
        context = ocp.Context()
        # else, where a folder cannot be made, threads wait 5 minutes for it
        context.asynchronous.create_directories_asynchronously = False
        # floats shrink by 8 %, for a third of the time and as much memory as all of the state
        context.array_options.saving.use_compression = False
        self._checkpointer = ocp.training.Checkpointer(
            folder.absolute(),
            context=context,
            preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        )
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future | None = None

    def save(self, step: int, state: Tree, extras: dict) -> None:
        """Start saving the checkpoint after round `step`, once the previous save is done.

        The state's arrays are on the host, and nobody changes them from now on; `extras` is JSON.
        """
        extras = extras | {"sha256": tree_hash(state)}
        with self._as_lockstep_error():
            self._wait()
        self._saving = self._thread.submit(
            self._checkpointer.save_checkpointables,
            step,
            # orbax would copy all of it, in case somebody changes it meanwhile
            {
                "state": jax.tree.map(lambda x: x.view(_Unchanged), state),
                "rest": {"json": json.dumps(extras)},
            },
            overwrite=True,
            force=True,  # whatever orbax thinks of the rounds between two checkpoints
        )

    def newest(self, like: Tree) -> Saved | None:
        """Return the newest undamaged checkpoint, in the structure of `like`; None without any.

        If all are damaged, it raises an error: a training must not silently start over.
        """
        with self._as_lockstep_error():
            self._wait()
        damage = None
        for checkpoint in reversed(self._checkpointer.checkpoints):
            try:
                return self._load(checkpoint.step, like)
            except Exception as error:  # whatever orbax makes of damaged bytes
                damage = first_line(error)
                log.warning(
                    f"train: checkpoint {checkpoint.step} is damaged; trying the one before it"
                )
        if damage:
            raise LockstepError(
                f"{self.folder}: {damage}, expected a whole checkpoint; start over after "
                "`lockstep clean`"
            )
        return None

    def _load(self, step: int, like: Tree) -> Saved:
        # one after the other: where one is damaged, orbax does not await the load of the other
        loaded: dict[str, Any] = {}
        # orbax cuts an array to a given length, and nobody knows that of a blob
        blobs = any(map(is_blob, jax.tree.leaves(like)))
        for name, form in (("rest", None), ("state", None if blobs else like)):
            loaded |= self._checkpointer.load_checkpointables(step, {name: form})
        state = jax.tree.map(np.asarray, loaded["state"])
        if blobs:
            state = fitted(flatten(state), like, self.folder)
        extras = json.loads(loaded["rest"]["json"])
        if tree_hash(state) != extras.pop("sha256"):
            raise ValueError("the state differs from the one that was saved")
        return Saved(step, state, extras)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the last checkpoint; an error already under way goes before its error."""
        with suppress(*([] if kind is None else [LockstepError])):
            self.close()

    def close(self) -> None:
        """Wait until the last checkpoint is saved."""
        with self._as_lockstep_error():
            try:
                self._wait()
            finally:
                self._thread.shutdown()
                self._checkpointer.close()

    def _wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving:
            saving.result()

    def _as_lockstep_error(self) -> AbstractContextManager[None]:
        """Name the folder in a checkpoint's error, mostly a full disk; the next call raises it."""
        # raised by orbax, tensorstore or the system
        return expecting(self.folder, "to write a checkpoint there", Exception)
