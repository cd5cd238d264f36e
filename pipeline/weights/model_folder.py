"""A trained model as a Hugging Face folder: weights, tokenizer, and what generation begins with."""

import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lockstep.files import write_json
from lockstep.transcript.tensorfile import TensorFile
from pipeline.weights import generation_config, hf

# Kinds of RoPE for which max_position_embeddings is more than a limit: "dynamic" computes its
# angles from it; for "yarn", transformers expects `factor` times the original length, or warns.
FIXED_CONTEXT = ("dynamic", "yarn")
WEIGHT_PATTERNS = ("*.safetensors", hf.INDEX)


def write(
    folder: Path,
    model: dict[str, Any],
    max_seq_len: int,
    params: dict[str, Any] | TensorFile,
    dtype: str,
    *,
    tokenizer: Path,
    checkpoint: Path,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a model that was trained on sequences of `max_seq_len` tokens.

    `tokenizer` is the folder of the one that made the tokens, where there is one. The second choice
    is that of `checkpoint`, the folder of the model that training began with. `model` is the
    content of config.json; other arguments are as in `hf.write_folder`.
    """
    model = with_context(model, max_seq_len)
    hf.write_folder(folder, model, params, dtype, advance=advance)
    for file in (tokenizer if tokenizer.is_dir() else checkpoint).iterdir():
        if file.name != hf.CONFIG and not any(fnmatch(file.name, name) for name in WEIGHT_PATTERNS):
            shutil.copyfile(file, folder / file.name)
    settings = generation_config.make(checkpoint, model, folder)
    write_json(folder / generation_config.NAME, settings)


def with_context(model: dict[str, Any], max_seq_len: int) -> dict[str, Any]:
    """Return a model's config.json with the context that it was trained on.

    If RoPE is computed from max_position_embeddings, another number would be another model.
    """
    _, config = hf.model_of(model, "the model's config.json")
    context = config.max_position_embeddings
    if config.rope.rope_type not in FIXED_CONTEXT:
        context = max(context, max_seq_len)
    return model | {"max_position_embeddings": context}
