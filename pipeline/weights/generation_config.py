"""generation_config.json: with which tokens transformers begins, ends and fills a text."""

from pathlib import Path
from typing import Any

from pipeline.errors import LockstepError
from pipeline.stage import artifacts
from pipeline.tokens.tokenizer_files import load_tokenizer

NAME = "generation_config.json"
# They do nothing where nothing is sampled; transformers warns of them, and 4 does not save them.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def make(checkpoint: Path, model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the file is to say.

    Args:
      checkpoint: a folder with the checkpoint's own file, which may not be there.
      model: config.json.
      folder: the export, with its tokenizer if there is one.

    Raises:
      LockstepError: a file that the checkpoint or the data brought is none of its kind.
    """
    return _agreed(checkpoint / NAME, model, _special_tokens(folder))


def _agreed(path: Path, model: dict[str, Any], special: dict[str, int]) -> dict[str, Any]:
    """The settings of the checkpoint's own file, where it has one, with ids that all agree on.

    Begin and padding are the tokenizer's; else the checkpoint's, else config.json's. A text ends
    at any token that one of them ends it with, as with a chat's end of turn beside the end of
    text. A number that is no token of the model is nobody's.
    """
    own = _settings(path) if path.exists() else {"_from_model_config": True}
    found = {}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        asked = (special, own, model) if key != "eos_token_id" else (own, special, model)
        ids = [token for source in asked for token in _ids(source.get(key), model["vocab_size"])]
        found[key] = list(dict.fromkeys(ids))
    begin, end, pad = found.values()
    one = {"bos_token_id": begin[:1], "eos_token_id": end, "pad_token_id": pad[:1]}
    rest = {key: value for key, value in own.items() if key not in one}
    return rest | {key: ids[0] if len(ids) == 1 else ids for key, ids in one.items() if ids}


def _settings(path: Path) -> dict[str, Any]:
    """What a generation_config.json says, without what does nothing."""
    settings = _table(path)
    idle = () if settings.get("do_sample") is True else SAMPLING
    return {
        key: value for key, value in settings.items() if key not in (*idle, "transformers_version")
    }


def _ids(value: Any, vocab_size: int) -> list[int]:
    """The token ids in a value that may be absent, one number or a list."""
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if type(token) is int and 0 <= token < vocab_size]


def _special_tokens(folder: Path) -> dict[str, int]:
    """The ids of the special tokens that a folder's tokenizer names; nothing where it has none.

    Raises:
      LockstepError: its tokenizer.json is none, or what names them is no table.
    """
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        return {}
    vocabulary = load_tokenizer(tokenizer)
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one counts
        if (folder / name).is_file():
            named |= _table(folder / name)
    found = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        token = named.get(name)  # text, or a table that holds it
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (index := vocabulary.token_to_id(token)) is not None:
            found[f"{name}_id"] = index
    return found


def _table(path: Path) -> dict[str, Any]:
    """The table in a JSON file that came from elsewhere."""
    found = artifacts.read_json(path)
    if not isinstance(found, dict):
        raise LockstepError(f"{path}: found {type(found).__name__}, expected a table")
    return found
