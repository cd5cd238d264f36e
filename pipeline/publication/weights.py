"""Whether a published run began with the weights that it names, and ended in those published."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.publication.layout import TRANSCRIPT, Publication
from pipeline.stage.artifacts import sha256_file
from pipeline.transcript.state import State
from pipeline.transcript.transcript import Transcript
from pipeline.weights import hf, model_folder
from pipeline.weights.trees import fitted, load_nested, load_tree
from pipeline.wire.commitment import flatten, tree_hash


@dataclass(frozen=True)
class PublishedTranscript(Transcript):
    """A transcript beside the weights that it ends in.

    Attributes:
      weights: Folder of the weights, where they are the last params; None where the transcript has
        these, and the weights are rounded.
    """

    weights: Path | None

    def agreed(self, step: int, like: State) -> tuple[Tree, Tree]:
        """Return the params and the optimizer's shared state after `step`."""
        if self.weights is None or step != self.snapshots[-1]:
            return super().agreed(step, like)
        shared = load_tree(self._snapshot(step) / "shared.safetensors", like.shared)
        return fitted(flatten(hf.read_folder(self.weights)[1]), like.params, self.weights), shared


def check(
    folder: Path,
    aside: Path,
    publication: Publication,
    run: runfile.Run,
    transcript: PublishedTranscript,
) -> None:
    """Check that stage export makes the published weights of the params that were trained.

    Where weights are float32 they are these params. Otherwise the transcript, whose header was
    audited, has them, and rounding them must give the weights: they are made again in `aside`.

    Raises:
      LockstepError: The weights, or config.json, are of another model.
    """
    last = transcript.snapshots[-1]
    if transcript.weights is not None:
        whose, params = "the weights", hf.read_folder(transcript.weights)[1]
    else:
        path = transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors"
        whose, params = f"{path.relative_to(folder)}", load_nested(path)
    found, expected = tree_hash(params), transcript.hashes(last).params
    if found != expected:
        raise LockstepError(
            f"{whose}: params of hash {found[:12]}, expected {expected[:12]} of the params after "
            f"round {last}"
        )
    with tempfile.TemporaryDirectory(prefix="weights-", dir=aside) as name:
        again = Path(name)
        model = model_folder.with_context(transcript.header.model, run.llm.max_seq_len)
        hf.write_folder(again, model, params, run.export.dtype)
        _compare(folder, publication, again)


def fresh_seed(run: runfile.Run, transcript: Transcript, *, bitwise: bool) -> int | None:
    """Draw fresh weights again; return their seed, or None if the run did not begin with such.

    They are drawn on a CPU, of which another kind may give other last bits: then it is None too.
    `bitwise` says whether bits of the training are those of this machine.

    Raises:
      LockstepError: The first snapshot has other params, though a CPU like this one made them.
    """
    checkpoint = run.llm.checkpoint
    if not isinstance(checkpoint, runfile.CheckpointInit):
        return None
    header = transcript.header
    model, config = hf.model_of(header.model, "header.json")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        found = tree_hash(jax.device_get(model.init(config, checkpoint.seed)))
    began = transcript.hashes(transcript.snapshots[0]).params
    if found == began:
        return checkpoint.seed
    if bitwise and header.environment.get("platform") == "cpu":
        raise LockstepError(
            f"{TRANSCRIPT}: params before the first round of hash {began[:12]}, expected "
            f"{found[:12]} of fresh weights with seed {checkpoint.seed}"
        )
    return None


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
