"""The model of `lockstep new`: a folder, a name on the hub, or a named size of fresh weights."""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.net import hub_files
from pipeline.runfile.checkpoint import is_path
from pipeline.stage.artifacts import read_json
from pipeline.stage.progress import Progress
from pipeline.tokens.tokenizer_files import TOKENIZER_FILES
from pipeline.weights import hf

FRESH = "init:"
IN_RUN = "model.LLM.checkpoint.Hub"
ATTEMPTS = 3  # to reach the hub: somebody waits for the answer
_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def _llama(vocabulary: int, width: int, inner: int, layers: int, heads: int, **more: Any) -> dict:
    return _LLAMA | {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        **more,
    }


SIZES = {  # Llamas by their number of parameters, which a test counts
    "2m": _llama(4096, 128, 352, 4, 4, max_position_embeddings=256),  # of params/run.toml
    "134m": _llama(32000, 768, 2048, 12, 12),
    "1.1b": _llama(32000, 2048, 5632, 22, 32, num_key_value_heads=4),  # TinyLlama's shape
    "1.2b": _llama(32000, 2048, 5504, 22, 16),  # of params/paper/distro-1.2b.toml
}


class StartingModel(NamedTuple):
    """What a run trains.

    Attributes:
      checkpoint: Its table in a run file.
      config: Its config.json.
      tokenizer: The folder or the name on the hub that has its tokenizer; None without one.
      params: Number of its parameters.
      groups: Top-level names of the params.
      said: What it is, for people.
      revision: Commit of its tokenizer on the hub; None in a folder.
    """

    checkpoint: dict[str, Any]
    config: dict[str, Any]
    tokenizer: str | None
    params: int
    groups: tuple[str, ...]
    said: str
    revision: str | None = None

    @property
    def architecture(self) -> str:
        """Its family, in Psyche's words."""
        return "HfLlama" if self.config["model_type"] == "llama" else "HfAuto"

    @property
    def longest(self) -> int:
        """The most tokens that it takes at once."""
        return self.config["max_position_embeddings"]


def model_named(name: str, root: Path) -> StartingModel:
    """Return the model that `--model` names; the config of one on the hub is fetched into data/.

    Raises:
      LockstepError: There is no such model, or Lockstep does not have its architecture.
    """
    if name.startswith(FRESH):
        size = name.removeprefix(FRESH)
        if size not in SIZES:
            raise LockstepError(f"--model {name}: expected {FRESH} and one of {', '.join(SIZES)}")
        return _fresh(SIZES[size], f"fresh weights of the size {size}", None)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        config, commit = _config_on_hub(name, None, root, "--model")
        checkpoint = {"Hub": {"repo_id": name, "revision": commit}}
        found = _described(
            checkpoint, config, name, f"{name} on the hub at its commit of today", name
        )
        return found._replace(revision=commit)
    config = hf.read_config(folder)
    path = as_path(name)
    tokenizer = path if any((folder / file).is_file() for file in TOKENIZER_FILES) else None
    if not any(folder.glob("*.safetensors")):
        said = f"fresh weights of the shape of {folder / hf.CONFIG}, beside which there are none"
        return _fresh(config, said, tokenizer)
    return _described({"Hub": {"repo_id": path}}, config, tokenizer, f"the folder {name}", path)


def model_of_run(run: runfile.Run, root: Path) -> StartingModel | None:
    """Return the model of a run file, or None where only stage convert can know it.

    Raises:
      LockstepError: Its folder or its name on the hub cannot be read.
    """
    match run.llm.checkpoint:
        case runfile.CheckpointInit() as init:
            return _described({}, dict(init.config), None, "the run's own", "its config")
        case runfile.CheckpointHub() as hub:
            folder = Path(hub.repo_id).expanduser()
            if hub.revision is None and folder.is_dir():
                config = hf.read_config(folder)
            else:
                config, _ = _config_on_hub(hub.repo_id, hub.revision, root, IN_RUN)
            return _described({}, config, None, "the run's own", hub.repo_id)
    return None


def as_path(name: str) -> str:
    """Return a folder's name as a path that is no name on the hub."""
    return name if is_path(name) else f"./{name}"


def _fresh(config: dict[str, Any], said: str, tokenizer: str | None) -> StartingModel:
    known = hf.model_of(config, "--model")[1].to_hf()
    own = {key: value for key, value in config.items() if key in known and known[key] == value}
    checkpoint = {"Init": {"seed": 0, "config": own}}
    return _described(checkpoint, own, tokenizer, said, "--model")


def _described(
    checkpoint: dict[str, Any], config: dict[str, Any], tokenizer: str | None, said: str, where: str
) -> StartingModel:
    model, parsed = hf.model_of(config, where)
    shapes = model.shapes(parsed)
    params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    whole = config | {"max_position_embeddings": parsed.max_position_embeddings}
    return StartingModel(checkpoint, whole, tokenizer, params, tuple(shapes), said)


def _config_on_hub(
    repo_id: str, revision: str | None, root: Path, key: str
) -> tuple[dict[str, Any], str]:
    """Fetch config.json alone into the store that the run will use; return it and its commit."""
    name = f"{key} {repo_id}"
    expected = f"a folder, {'' if key == IN_RUN else f'{FRESH}SIZE '}or a model on the hub"
    folder = hub_files.download(
        name,
        repo_id,
        revision,
        root / "data" / "store",
        (hf.CONFIG,),
        expected,
        runfile.Network(attempts=ATTEMPTS),
        partial(Progress, "new"),
    )
    return read_json(folder / hf.CONFIG), folder.name
