"""Stage convert again: what a run began with, drawn from its seed or a checkpoint of the reader's.

Only its hash is published. The state of an earlier run, which this one extends, is published whole:
nobody else has it.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep.errors import LockstepError, RequestError, brief
from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import device_groups
from lockstep.transcript.trees import tree_hash
from pipeline import runfile
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.outputs import HEADER, RUN, SOURCE, TRANSCRIPT
from pipeline.recheck.published import ChainStart, PublishedRun
from pipeline.start.set_up import Setup
from pipeline.subject import subject_of
from pipeline.weights import hf
from pipeline.weights.fresh import fresh_params

FRESH = runfile.CheckpointInit | runfile.CheckpointEphemeral
NAMES_OF_A_CHECKPOINT = ("seed", "repo_id", "revision", "bucket", "prefix", "key")


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Make the run's first weights once more, if messages are kept; else `witness` may."""
    if published.kept:
        published.start = make_start(published)
        return [start_claim(published.start)]
    return []


def start_claim(start: ChainStart) -> PublicClaim:
    """Return the claim about what a published run began with."""
    text = f"the run begins with {start.text}"
    return PublicClaim("start", start.kind, text if start.kind == "proven" else f"that {text}")


def is_given(run: runfile.Run) -> bool:
    """Return whether a publication has the whole state that the run began with."""
    return isinstance(run.llm.checkpoint, runfile.CheckpointRun)


def can_make_start(published: PublishedRun) -> bool:
    """Return whether what the run began with can be made here."""
    checkpoint = published.own.checkpoint
    return checkpoint is not None or isinstance(published.run.llm.checkpoint, FRESH)


def make_start(published: PublishedRun) -> ChainStart:
    """Return the state that a published run began with, made again.

    Raises:
      LockstepError: It is not the one that the transcript names, or the checkpoint is not here.
    """
    setup, transcript, folder = published.setup, published.transcript, published.own.checkpoint
    first, checkpoint = transcript.snapshots[0], setup.run.llm.checkpoint
    if is_given(setup.run):
        if folder is not None:
            raise RequestError(
                f"--checkpoint {folder}: the run extends run {checkpoint.key}, whose state is "
                "published; expected no --checkpoint"
            )
        text = f"the author's state of run {checkpoint.key}, which it extends"
        return ChainStart(*transcript.agreed(first, setup.start.state), "stated", text)
    params, text = _params(setup, folder)
    params_hash = tree_hash(params)
    recorded = transcript.hashes(first, setup.run.peers.count)
    if params_hash != recorded.params:
        raise LockstepError(
            f"{TRANSCRIPT}: the params before the first round have hash {recorded.params[:12]}, "
            f"expected {params_hash[:12]}, the hash of {text}"
        )
    group = device_groups(jax.devices(), setup.programs.parts)[0]
    own, shared = jax.tree.map(np.asarray, setup.programs.init(group.put(params)))
    if {*recorded.own} != {tree_hash(own)}:
        raise LockstepError(
            f"{TRANSCRIPT}: the peers' states before the first round differ from new ones, "
            f"expected hash {tree_hash(own)[:12]}"
        )
    if recorded.shared != (due := tree_hash(shared)):
        raise LockstepError(
            f"{TRANSCRIPT}: the shared state before the first round has hash "
            f"{recorded.shared[:12]}, expected {due[:12]}, the hash of a new one"
        )
    return ChainStart(params, shared, "proven", text)


def _params(setup: Setup, folder: Path | None) -> tuple[Tree, str]:
    """Return the params that a published run file names, and what they are."""
    run, model = setup.run, setup.model
    variant = run.llm.checkpoint
    if folder and isinstance(variant, FRESH):
        raise RequestError(
            f"--checkpoint {folder}: the run began with fresh weights, expected no --checkpoint"
        )
    match variant:
        case runfile.CheckpointInit():
            kinds = hf.ARCHITECTURES.get(run.llm.architecture) or [None]
            named = {"model_type": kinds[0]} | variant.config
            _check_model(model, named, "float32", "model.LLM.checkpoint.Init.config")
            architecture, config = hf.model_of(model, HEADER)
            params = jax.device_get(fresh_params(architecture, config, variant.seed))
            return params, f"fresh weights of seed {variant.seed}"
        case runfile.CheckpointEphemeral():
            begins = setup.subject.begins
            return begins.params_again(run, model), f"fresh weights of seed {begins.seed(run)}"
    if folder is None:
        raise RequestError(
            f"{SOURCE}: the run began with {runfile.variant_name(variant)}, and only its hash is "
            "published; expected --checkpoint FOLDER, with its config.json and safetensors"
        )
    stored = hf.HfFolder(folder)
    _check_model(model, hf.read_config(folder), stored.hf_config["dtype"], str(folder))
    return hf.read_folder(folder)[1], f"the checkpoint in {folder}"


def _check_model(model: dict, hf_config: dict, dtype: str, where: str) -> None:
    """Compare the header's model with what stage convert makes of a config."""
    expected = hf.whole_config(hf_config, dtype, where)
    for key in sorted(model.keys() | expected.keys()):
        if model.get(key) != expected.get(key):
            found, due = (brief(repr(config.get(key))) for config in (model, expected))
            raise LockstepError(
                f"{HEADER}: {brief(key)} of the model is {found}, expected {due} as in {where}"
            )


def check_source(source: dict[str, Any], run: runfile.Run) -> None:
    """Check that source.json names the run file's checkpoint, as the card does.

    Its commit is stated.
    """
    checkpoint = run.llm.checkpoint
    expected = {name: getattr(checkpoint, name, None) for name in NAMES_OF_A_CHECKPOINT}
    if isinstance(checkpoint, runfile.CheckpointEphemeral):
        expected["seed"] = subject_of(run).begins.seed(run)
    expected |= {"checkpoint": checkpoint.tag()}
    if expected["repo_id"] is None:
        expected |= {"commit": None}
    for name, value in expected.items():
        if source.get(name) != value:
            raise LockstepError(
                f"{SOURCE}: {name} is {brief(repr(source.get(name)))}, expected "
                f"{brief(repr(value))} as in {RUN}"
            )
