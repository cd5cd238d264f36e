"""What a model's folder says of its texts: where one begins and ends, and how one is written.

One answer for all that read or write texts. As in transformers, generation_config.json comes before
config.json. Besides, a text ends with the token that the tokenizer's files call its end: a model
that was trained on documents learned to write it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from lockstep.files import read_json
from pipeline.tokens.tokenizer_files import GENERATION, SETTINGS, SPECIAL
from pipeline.weights import hf

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Settings of transformers' `generate` that are not done here, and the values that do nothing.
NOT_DONE: dict[str, tuple] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("bad_words_ids", "force_words_ids", "constraints", "sequence_bias"), ()),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "stop_strings"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "dola_layers"), ()),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config", "max_time"), ()),
    **dict.fromkeys(("token_healing", "remove_invalid_values"), (False,)),
}
NOT_DRAWN: dict[str, tuple] = {  # of drawn texts alone
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (0,)),
    "typical_p": (1,),
    "top_h": (),
}
DRAWN = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # done; what transformers takes without
# Done by the caller, or without effect on the text.
OTHER_SETTINGS = {"do_sample", "use_cache", "pad_token_id", "length_penalty", "early_stopping"}


class TextSettings(NamedTuple):
    """What a model's folder says of its texts.

    Attributes:
      beginning: The token that begins a text or, if none does, ends the text before it.
      ends: Tokens that end a text, all of the vocabulary.
      generation: Settings of generation_config.json, or without one those of config.json.
    """

    beginning: int | None
    ends: tuple[int, ...]
    generation: Mapping[str, Any]

    def not_done(self, *, drawn: bool) -> str:
        """Return the settings that transformers would follow here and this project does not."""
        return ", ".join(not_done(self.generation, drawn=drawn))


def not_done(
    settings: Mapping[str, Any], *, drawn: bool, known: set[str] | None = None
) -> Iterator[str]:
    """Yield the settings of a text that have an effect in transformers, and none here.

    Where `known` are the other keys that a caller reads, any further key is one too.
    """
    values = NOT_DONE | (NOT_DRAWN if drawn else {})
    for key, value in settings.items():
        idle = values.get(key)
        if idle is None and (known is None or key in {*known, *OTHER_SETTINGS, *DRAWN, *NOT_DRAWN}):
            continue
        if value not in (None, [], {}, "") and value not in (idle or ()):
            yield f"{key} = {value}"


def read(
    folder: Path,
    config: dict[str, Any],
    tokenizer: Tokenizer | None,
    generation: dict[str, Any] | None = None,
) -> TextSettings:
    """Read the settings of texts of a model's folder with this config.json and tokenizer.

    `generation` is its generation_config.json, where that is not there yet.
    """
    if generation is None and (folder / GENERATION).exists():
        generation = read_json(folder / GENERATION)
    said, special = generation or {}, special_tokens(folder, tokenizer)
    _, parsed = hf.model_of(config, folder / hf.CONFIG)
    ends = token_ids(said, special, config)["eos_token_id"]
    if not ends and generation is None:  # the class's default
        ends = _ids(parsed.eos_token_id, parsed.vocab_size)
    begin, end, _ = TOKEN_KEYS
    firsts = [special.get(begin), special.get(end), said.get(begin), config.get(begin)]
    firsts += [said.get(end), config.get(end), parsed.bos_token_id]
    first = next((first for first in firsts if first not in (None, [])), None)
    first = first[0] if isinstance(first, list) else first
    return TextSettings(first, tuple(ends), config if generation is None else generation)


def token_ids(
    generation: dict[str, Any], special: dict[str, int], config: dict[str, Any]
) -> dict[str, list[int]]:
    """Return the ids that begin, end and pad a text, by key.

    Beginning and padding are the tokenizer's, else generation_config.json's, else config.json's. A
    text ends at any id that one of the first two names, or config.json where the second names none.
    Ids beyond the vocabulary are left out.
    """
    found = {}
    for key in TOKEN_KEYS:
        sources = (generation, special) if key == "eos_token_id" else (special, generation)
        ids = [_ids(source.get(key), config["vocab_size"]) for source in (*sources, config)]
        named = ids[0] + ids[1] + (ids[2] if not ids[0] else [])
        found[key] = list(dict.fromkeys(named))
    return found | {key: (found[key])[:1] for key in (TOKEN_KEYS[0], TOKEN_KEYS[2])}


def special_tokens(folder: Path, tokenizer: Tokenizer | None) -> dict[str, int]:
    """Return the ids of the special tokens that a folder's files name, if it has a tokenizer."""
    named: dict[str, Any] = {}
    for name in (SPECIAL, SETTINGS):  # the later one counts
        if tokenizer is not None and (folder / name).is_file():
            said = read_json(folder / name)
            named |= {key: value for key, value in said.items() if value is not None}
    ids = {}
    for key in TOKEN_KEYS:
        token = named.get(key.removesuffix("_id"))  # text, or a table that holds it
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and (index := tokenizer.token_to_id(token)) is not None:
            ids[key] = index
    return ids


def _ids(value: Any, vocab_size: int) -> list[int]:
    """Return the token ids in a text setting that may be absent, one number or several."""
    ids = value if isinstance(value, list | tuple) else [value]
    return [token for token in ids if type(token) is int and 0 <= token < vocab_size]
