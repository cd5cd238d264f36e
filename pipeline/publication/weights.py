"""Whether the published weights are the params after the last round of the transcript."""

import tempfile
from pathlib import Path

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.publication.layout import PROOF
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
