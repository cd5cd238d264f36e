"""The params of a published run, from its start to the weights that are published."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from lockstep.optim.optimizer import Tree
from lockstep.transcript.state import State
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import fitted, load_nested, load_tree, save_tree
from lockstep.wire.commitment import flatten, tree_hash
from parts.publication.checks.start_of_chain import ChainStart
from parts.publication.layout import TRANSCRIPT, Publication
from pipeline import runfile
from pipeline.audit.merges import BrokenChainError, follow_params
from pipeline.start.begin import Setup
from pipeline.subject import subject_of, subject_of_model


@dataclass(frozen=True)
class PublishedTranscript(Transcript):
    """A transcript beside the weights that it ends in.

    Attributes:
      weights: Folder of the weights, where they are the last params and nothing else has these.
      followed: Whether the params and the shared state at some snapshots were put there, as they
        follow from the run's start.
    """

    weights: Path | None = None
    followed: bool = False

    def agreed(self, step: int, like: State) -> tuple[Tree, Tree]:
        """Return the params and the optimizer's shared state after `step`."""
        if self.followed or self.weights is None or step != self.snapshots[-1]:
            return super().agreed(step, like)
        shared = load_tree(self._snapshot(step) / "shared.safetensors", like.shared)
        params = flatten(params_of(self.weights, self))
        return fitted(params, like.params, self.weights), shared


def follow(
    audited: Setup, transcript: PublishedTranscript, start: ChainStart, steps: set[int]
) -> PublishedTranscript:
    """Follow the params from the run's start; put those at some `steps` into the transcript.

    Its folder is the reader's own, of `unpacked`.

    Raises:
      LockstepError: They do not lead to the weights.
    """
    steps = steps | {transcript.snapshots[-1]}

    def keep(step: int, params: Tree, shared: Tree) -> None:
        for name, tree in (("params", params), ("shared", shared)):
            path = transcript.folder / "snapshots" / f"{step:05}" / f"{name}.safetensors"
            if step in steps and not path.exists():  # a given start is there
                save_tree(path, tree)

    try:
        follow_params(audited, transcript, start.params, start.shared, keep)
    except BrokenChainError as error:
        names = ", ".join(sorted(audited.programs.unruled))
        perhaps = f"; {names} may have other bits on another machine" if names else ""
        raise LockstepError(
            f"{TRANSCRIPT}: round {error.finding.round}, params: {error}{perhaps}"
        ) from error
    return replace(transcript, followed=True)


def params_of(folder: Path, transcript: Transcript) -> Tree:
    """Return the params of published weights, which the transcript says how to read."""
    model = transcript.header.model
    return subject_of_model(model).exported_params(model, folder)


def is_workload(transcript: Transcript) -> bool:
    """Whether a workload was trained."""
    return "workload" in transcript.header.model


def check(
    folder: Path,
    aside: Path,
    publication: Publication,
    run: runfile.Run,
    transcript: PublishedTranscript,
) -> None:
    """Check that stage export makes the published weights of the params that were trained.

    They are made again in `aside`. The params are those that follow from the run's start or, where
    messages are not kept, those that the transcript's last snapshot has the hash of.

    Raises:
      LockstepError: The weights, or config.json, are of another model.
    """
    last = transcript.snapshots[-1]
    if transcript.weights is not None and not transcript.followed:
        params = params_of(transcript.weights, transcript)
    else:
        params = load_nested(transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors")
    found, expected = tree_hash(params), transcript.hashes(last).params
    if found != expected:
        raise LockstepError(
            f"the weights: params of hash {found[:12]}, expected {expected[:12]} of the params "
            f"after round {last}"
        )
    with tempfile.TemporaryDirectory(prefix="weights-", dir=aside) as name:
        again = Path(name)
        _write(again, transcript, params, run)
        _compare(folder, publication, again)


def _write(folder: Path, transcript: Transcript, params: Tree, run: runfile.Run) -> None:
    """Write what stage export makes of some params, but for what a workload writes by itself."""
    subject_of(run).export_weights(run, transcript.header.model, params, folder)


def _compare(folder: Path, publication: Publication, again: Path) -> None:
    """Compare what a model is read from with what was made again."""
    names = {file.name for file in again.iterdir()}
    names |= {name for name in publication.exported if ".safetensors" in name}
    for name in sorted(names):
        found, expected = (
            sha256_file(place / name)[:12] if (place / name).is_file() else "no file"
            for place in (folder, again)
        )
        if found != expected:
            raise LockstepError(
                f"{name}: {found}, expected {expected}, which stage export makes of the params "
                "that were trained"
            )
