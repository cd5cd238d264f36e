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
from pipeline.swarm.begin import Setup
from pipeline.transcript.state import State
from pipeline.transcript.transcript import Transcript
from pipeline.weights import hf, model_folder
from pipeline.weights.trees import fitted, load_nested, load_tree
from pipeline.wire.commitment import flatten, tree_hash
from pipeline.workload import export_folder
from pipeline.workload.description import of_model

HEADER = f"{TRANSCRIPT}/header.json"


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
        params = flatten(params_of(self.weights, self))
        return fitted(params, like.params, self.weights), shared


def params_of(folder: Path, transcript: Transcript) -> Tree:
    """Return the params of published weights, which the transcript says how to read."""
    if is_workload(transcript):
        return export_folder.read(folder, of_model(transcript.header.model, HEADER))
    return hf.read_folder(folder)[1]


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

    Where weights are float32 they are these params. Otherwise the transcript, whose header was
    audited, has them, and rounding them must give the weights: they are made again in `aside`.

    Raises:
      LockstepError: The weights, or config.json, are of another model.
    """
    last = transcript.snapshots[-1]
    if transcript.weights is not None:
        whose, params = "the weights", params_of(transcript.weights, transcript)
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
        _write(again, transcript, params, run)
        _compare(folder, publication, again)


def _write(folder: Path, transcript: Transcript, params: Tree, run: runfile.Run) -> None:
    """Write what stage export makes of some params, but for what a workload writes by itself."""
    model = transcript.header.model
    if is_workload(transcript):
        leaves = {name.replace("/", "."): leaf for name, leaf in flatten(params).items()}
        export_folder.write_params(folder, of_model(model, HEADER), leaves.get, run.export.dtype)
        return
    whole = model_folder.with_context(model, run.llm.max_seq_len)
    hf.write_folder(folder, whole, params, run.export.dtype)


def fresh_seed(setup: Setup, transcript: Transcript, *, bitwise: bool) -> int | None:
    """Draw fresh weights again; return their seed, or None if the run did not begin with such.

    They are drawn on a CPU, of which another kind may give other last bits: then it is None too.
    A workload draws its own. `bitwise` says whether bits of the training are those of this machine.

    Raises:
      LockstepError: The first snapshot has other params, though a CPU like this one made them.
    """
    run, header = setup.run, transcript.header
    checkpoint, same = run.llm.checkpoint, bitwise
    if isinstance(checkpoint, runfile.CheckpointInit):
        seed, same = checkpoint.seed, bitwise and header.environment.get("platform") == "cpu"
        model, config = hf.model_of(header.model, HEADER)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            found = tree_hash(jax.device_get(model.init(config, seed)))
    elif isinstance(checkpoint, runfile.CheckpointEphemeral):
        seed, found = run.workload.seed, tree_hash(setup.programs.worker.init())
    else:
        return None
    began = transcript.hashes(transcript.snapshots[0]).params
    if found == began:
        return seed
    if same:
        raise LockstepError(
            f"{TRANSCRIPT}: params before the first round of hash {began[:12]}, expected "
            f"{found[:12]} of fresh weights with seed {seed}"
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
