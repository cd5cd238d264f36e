"""A trained model as a Hugging Face folder: weights, tokenizer, and what generation begins with.

generation_config.json names the tokens with which transformers begins, ends and pads a text.
"""

import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.files import read_json, write_json
from lockstep.optim.optimizer import Tree
from lockstep.transcript.tensorfile import TensorFile
from pipeline.runfile import Run
from pipeline.tokens.tokenizer_files import GENERATION, TOKENIZER, load_tokenizer
from pipeline.weights import hf
from pipeline.weights.text_settings import special_tokens, token_ids

# They have no effect without sampling; transformers warns of them, and version 4 drops them.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")

# Kinds of RoPE for which max_position_embeddings is more than a limit: "dynamic" computes its
# angles from it; for "yarn", transformers expects `factor` times the original length, or warns.
FIXED_CONTEXT = ("dynamic", "yarn")
WEIGHT_PATTERNS = ("*.safetensors", hf.INDEX)


class TrainedModel(NamedTuple):
    """What a run trained, to be exported."""

    model: dict[str, Any]  # as a transcript's header has it
    params: TensorFile | Tree
    shards: Path  # the folder that stage download left
    checkpoint: Path  # that of the initial model's files, if it has any


def write(
    folder: Path, run: Run, trained: TrainedModel, advance: Callable[[int], object] = lambda _: None
) -> None:
    """Write a trained model as a folder, with the tokenizer of the data or, without, its own.

    `advance` is as in `hf.write_folder`.
    """
    model = with_context(trained.model, run.llm.max_seq_len)
    tokenizer = trained.shards / "tokenizer"
    hf.write_folder(folder, model, trained.params, run.export.dtype, advance=advance)
    for file in (tokenizer if tokenizer.is_dir() else trained.checkpoint).iterdir():
        if file.name != hf.CONFIG and not any(fnmatch(file.name, name) for name in WEIGHT_PATTERNS):
            shutil.copyfile(file, folder / file.name)
    write_json(folder / GENERATION, generation_config(trained.checkpoint, model, folder))


def with_context(model: dict[str, Any], max_seq_len: int) -> dict[str, Any]:
    """Return a model's config.json with the context that it was trained on.

    If RoPE is computed from max_position_embeddings, another number would be another model.
    """
    _, config = hf.model_of(model, "the model's config.json")
    context = config.max_position_embeddings
    if config.rope.rope_type not in FIXED_CONTEXT:
        context = max(context, max_seq_len)
    return model | {"max_position_embeddings": context}


def generation_config(checkpoint: Path, model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the model folder's settings of generation, with all sources' token ids.

    `model` is the content of config.json, and `folder` that of the export, with its tokenizer if it
    has one.
    """
    path, tokenizer = checkpoint / GENERATION, folder / TOKENIZER
    own = read_json(path) if path.exists() else {"_from_model_config": True}
    vocabulary = load_tokenizer(tokenizer) if tokenizer.is_file() else None
    tokens = token_ids(own, special_tokens(folder, vocabulary), model)
    idle = {"transformers_version", *(() if own.get("do_sample") is True else SAMPLING)}
    rest = {key: value for key, value in own.items() if key not in {*tokens, *idle}}
    return rest | {key: ids[0] if len(ids) == 1 else ids for key, ids in tokens.items() if ids}
