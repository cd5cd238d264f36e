"""Whether a published run began with the weights that it names, and ended in those published."""

import tempfile
from pathlib import Path

import jax

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.publication.layout import PROOF, TRANSCRIPT
from pipeline.stage.artifacts import sha256_file
from pipeline.transcript.transcript import Transcript
from pipeline.weights import hf, model_folder
from pipeline.weights.hf import HfFolder
from pipeline.weights.tensorfile import TensorFile
from pipeline.weights.trees import load_nested
from pipeline.wire.commitment import tree_hash


def check(folder: Path, run: runfile.Run, transcript: Transcript) -> None:
    """Check that stage export makes the published weights of the params that were trained.

    Where weights are float32 they are these params, and complete the transcript's last snapshot.
    Otherwise the transcript has them, and rounding them must give the weights.

    Args:
      folder: The publication.
      run: Its run.
      transcript: Its transcript, whose header was audited.

    Raises:
      LockstepError: The weights, or config.json, are of another model.
    """
    last = transcript.snapshots[-1]
    params = transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors"
    whose = f"{params.relative_to(folder)}"
    if run.export.dtype == "float32":
        HfFolder(folder).save(params)
        whose = "the weights"
    found, expected = tree_hash(load_nested(params)), transcript.hashes(last).params
    if found != expected:
        raise LockstepError(
            f"{whose}: params of hash {found[:12]}, expected {expected[:12]} of the params after "
            f"round {last}"
        )
    with tempfile.TemporaryDirectory(dir=folder / PROOF) as name:
        again = Path(name)
        model = model_folder.with_context(transcript.header.model, run.llm.max_seq_len)
        hf.write_folder(again, model, TensorFile(params), run.export.dtype)
        _compare(folder, again)


def fresh_seed(run: runfile.Run, transcript: Transcript, *, bitwise: bool) -> int | None:
    """Draw fresh weights again; return their seed, or None if the run did not begin with such.

    They are drawn on a CPU, of which another kind may give other last bits: then it is None too.

    Args:
      run: The run.
      transcript: Its transcript, whose last params are of the model in its header.
      bitwise: Whether bits of the training are those of this machine.

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


def _compare(folder: Path, again: Path) -> None:
    """Compare what a model is read from with what was made again."""
    names = {file.name for file in again.iterdir()}
    names |= {file.name for file in folder.glob("*.safetensors*")}
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
