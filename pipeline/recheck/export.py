"""Stage export again: the published weights and the files beside them, made of the last params."""

import shutil
import tempfile
from pathlib import Path

from lockstep.errors import LockstepError, brief
from lockstep.files import read_json, sha256_file
from lockstep.transcript.trees import load_nested, tree_hash
from pipeline import runfile
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.outputs import COMPANIONS
from pipeline.recheck.published import PublishedRun, params_of
from pipeline.tokens.tokenizer_files import GENERATION
from pipeline.weights import model_folder
from pipeline.weights.model_folder import generation_config


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Check that stage export makes the published weights of the params that were trained.

    The params follow from the run's start or, where messages are not kept, have the hash in the
    transcript's last snapshot. A tokenizer was trained on, or came with, data that only the author
    has.
    """
    transcript, last = published.transcript, published.transcript.snapshots[-1]
    if transcript.weights is not None and not transcript.followed:
        params = params_of(transcript.weights, transcript)
    else:
        params = load_nested(transcript.folder / "snapshots" / f"{last:05}" / "params.safetensors")
    found, expected = tree_hash(params), transcript.hashes(last).params
    if found != expected:
        raise LockstepError(
            f"the weights have hash {found[:12]}, expected {expected[:12]}, the hash of the params "
            f"after round {last}"
        )
    run, model = published.run, published.setup.model
    with tempfile.TemporaryDirectory(prefix="weights-", dir=published.own.aside) as name:
        published.setup.subject.exports.export_weights(run, model, params, Path(name))
        _compare(published, Path(name))
    claims = _companions(published)
    if (code := published.setup.subject.code(model)) is not None:
        text = f"what code {code[:12]} of workloads/ means"
        claims.append(PublicClaim("code", "stated", text, {"sha256": code}))
    return claims


def _compare(published: PublishedRun, remade: Path) -> None:
    """Compare the exported files that a model is read from with those made again."""
    names = {file.name for file in remade.iterdir()}
    names |= {name for name in published.exported if ".safetensors" in name}
    for name in sorted(names):
        found, expected = (
            sha256_file(place / name)[:12] if (place / name).is_file() else "no file"
            for place in (published.folder, remade)
        )
        if found != expected:
            raise LockstepError(
                f"{name}: {found}, expected {expected}, which stage export writes from the "
                "trained params"
            )


def _companions(published: PublishedRun) -> list[PublicClaim]:
    """Return the claims about the exported files beside the weights.

    generation_config.json of a run that began with fresh weights follows from the tokenizer and the
    model.
    """
    names = sorted(published.exported.keys() & set(COMPANIONS))
    claims = [PublicClaim(name, "stated", name) for name in names]
    fresh = isinstance(published.run.llm.checkpoint, runfile.CheckpointInit)
    if GENERATION in names and fresh:
        _check_generation(published, names)
        text = f"{GENERATION} made again"
        claims.append(PublicClaim(GENERATION, "proven", text))
    return claims


def _check_generation(published: PublishedRun, names: list[str]) -> None:
    folder = published.folder
    with tempfile.TemporaryDirectory() as name:  # a checkpoint without settings of its own
        for file in names:
            if file != GENERATION:
                shutil.copyfile(folder / file, Path(name) / file)
        model = model_folder.with_context(published.setup.model, published.run.llm.max_seq_len)
        due = generation_config(Path(name) / "none", model, Path(name))
    data = read_json(folder / GENERATION)
    if data != due:
        raise LockstepError(
            f"{GENERATION}: {brief(str(data))}, expected {brief(str(due))} as stage export makes it"
        )
