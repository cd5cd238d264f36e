"""The model that a run begins with: what is there of it, and its shape, before it is fetched."""

import math
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.machine.progress import Progress
from pipeline import runfile
from pipeline.net.transfers import hub_files
from pipeline.stage.untrusted_files import expand
from pipeline.tokens.tokenizer_files import KINDS, TOKENIZER
from pipeline.weights import hf

IN_RUN = "model.LLM.checkpoint.Hub"
ATTEMPTS = 3  # to reach the hub: somebody waits for the answer


class ModelFiles(NamedTuple):
    """The files of a model in a folder or a repository."""

    repo_id: str  #: The folder or the repository, as a run file names it.
    where: str  #: What errors call it.
    folder: Path  #: The folder, or that of the small files that were fetched of a repository.
    names: frozenset[str]  #: Names of all files, those that were not fetched too.
    commit: str | None  #: Commit of the repository; None of a folder.

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has files of a tokenizer."""
        return not self.names.isdisjoint(KINDS)

    def config(self) -> dict[str, Any]:
        """Return the starting model's config.json."""
        if hf.CONFIG not in self.names:
            raise LockstepError(f"{self.where}: found no {hf.CONFIG}, expected a model with one")
        return read_json(self.folder / hf.CONFIG)

    def check_tokenizer(self, key: str) -> None:
        """Check that there is a tokenizer, which `key` of the run file names."""
        if not self.has_tokenizer:
            raise LockstepError(
                f"{key}: {self.repo_id} has no {TOKENIZER}, expected one, or vocab_size instead, "
                "so that a tokenizer is trained on the text"
            )

    def check_weights(self) -> None:
        """Check that all files of weights exist that the model names."""
        if self.names.isdisjoint((hf.WEIGHTS, hf.INDEX)):
            raise LockstepError(
                f"{self.where}: found neither {hf.WEIGHTS} nor {hf.INDEX}, expected weights there, "
                "or fresh ones: model.LLM.checkpoint.Init"
            )
        if hf.WEIGHTS in self.names:
            return
        hf.named_shards(self.folder / hf.INDEX, self.names, self.where)


def look(repo_id: str, revision: str | None, root: Path, where: str, expected: str) -> ModelFiles:
    """Return the files of a model; for one on the hub, fetch a listing and config.json.

    A folder of that name comes first, where there is no revision. `root` is the folder of `data/`,
    whose store keeps what is fetched. Errors call the model `where`, and end with `expected`.
    """
    folder = expand(repo_id, where)
    if revision is None and folder.is_dir():
        return ModelFiles(repo_id, str(folder), folder, frozenset(os.listdir(folder)), None)
    name, cache = f"{where} {repo_id}", root / "data" / "store"
    network = runfile.Network(attempts=ATTEMPTS)
    small, progress = (hf.CONFIG, hf.INDEX), partial(Progress, "hub")
    folder, listing = hub_files.download(
        name, repo_id, revision, cache, small, expected, network, progress
    )
    return ModelFiles(repo_id, name, folder, frozenset(listing.files), listing.commit)


class StartingModel(NamedTuple):
    """The model that a run begins with: its config, and whether there are weights."""

    checkpoint: dict[str, Any]  #: Its table in a run file.
    config: dict[str, Any]  #: Its config.json.
    #: The folder or the name on the hub that has its tokenizer; None without one.
    tokenizer: str | None
    params: int  #: Number of its parameters.
    groups: tuple[str, ...]  #: Top-level names of the params.
    label: str  #: What it is, for people.
    revision: str | None = None  #: Commit of its tokenizer on the hub; None in a folder.

    @property
    def is_trained(self) -> bool:
        """Whether there are weights to begin with, and not only a shape."""
        return "Hub" in self.checkpoint

    @property
    def architecture(self) -> str:
        """The model's family, in Psyche's words."""
        return "HfLlama" if self.config["model_type"] == "llama" else "HfAuto"

    @property
    def longest(self) -> int:
        """The most tokens that it takes at once."""
        return self.config["max_position_embeddings"]


def model_of_run(run: runfile.Run, root: Path) -> StartingModel | None:
    """Return the model of a run file, or None where only stage convert can know it."""
    match run.llm.checkpoint:
        case runfile.CheckpointInit() as init:
            return described({}, dict(init.config), None, "the run's own", "its config")
        case runfile.CheckpointHub() | runfile.CheckpointP2P() as hub:
            config = files_of_run(hub, root).config()
            return described({}, config, None, "the run's own", hub.repo_id)
    return None


def files_of_run(hub: runfile.CheckpointHub | runfile.CheckpointP2P, root: Path) -> ModelFiles:
    """Return the files of a run's model in its folder or on the hub."""
    return look(hub.repo_id, hub.revision, root, IN_RUN, "a folder or a model on the hub")


def described(
    checkpoint: dict[str, Any],
    config: dict[str, Any],
    tokenizer: str | None,
    label: str,
    where: str,
) -> StartingModel:
    """Return a model of a config.json, which errors call `where`."""
    model, parsed = hf.model_of(config, where)
    shapes = model.shapes(parsed)
    params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    full_config = config | {"max_position_embeddings": parsed.max_position_embeddings}
    return StartingModel(checkpoint, full_config, tokenizer, params, tuple(shapes), label)
