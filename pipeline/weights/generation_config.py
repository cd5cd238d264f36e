"""generation_config.json: the tokens with which transformers begins, ends and pads a text."""

from pathlib import Path
from typing import Any

from lockstep.files import read_json
from pipeline.tokens.tokenizer_files import load_tokenizer

NAME = "generation_config.json"
# They have no effect without sampling; transformers warns of them, and version 4 drops them.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def make(checkpoint: Path, model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the settings of the checkpoint's own file with the token ids of all sources.

    The ids of beginning and padding are the tokenizer's, else the checkpoint's, else those of
    config.json. A text ends at any id that one of the three ends it with, such as a chat's end of
    turn besides the end of text. Ids beyond the model's vocabulary are ignored. `model` is the
    content of config.json, and `folder` that of the export, with its tokenizer if it has one.
    """
    path, special, tokens = checkpoint / NAME, _special_tokens(folder), {}
    own = _settings(read_json(path)) if path.exists() else {"_from_model_config": True}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        sources = (special, own, model) if key != "eos_token_id" else (own, special, model)
        ids = [token for source in sources for token in _ids(source.get(key), model["vocab_size"])]
        tokens[key] = list(dict.fromkeys(ids))
    begin, end, pad = tokens.values()
    chosen = {"bos_token_id": begin[:1], "eos_token_id": end, "pad_token_id": pad[:1]}
    rest = {key: value for key, value in own.items() if key not in chosen}
    return rest | {key: ids[0] if len(ids) == 1 else ids for key, ids in chosen.items() if ids}


def _settings(own: dict[str, Any]) -> dict[str, Any]:
    """Return a generation_config.json without the keys that have no effect."""
    idle = () if own.get("do_sample") is True else SAMPLING
    return {key: value for key, value in own.items() if key not in (*idle, "transformers_version")}


def _ids(value: Any, vocab_size: int) -> list[int]:
    """Return the token ids in a value that may be absent, one number or a list."""
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if type(token) is int and 0 <= token < vocab_size]


def _special_tokens(folder: Path) -> dict[str, int]:
    """Return the ids of the special tokens that a folder's tokenizer names, if it has one."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return {}
    vocabulary = load_tokenizer(tokenizer)
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one counts
        if (folder / name).is_file():
            named |= read_json(folder / name)
    ids = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = named.get(name)  # text, or a table that holds it
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (index := vocabulary.token_to_id(token)) is not None:
            ids[f"{name}_id"] = index
    return ids
