"""How far a tokenizer may grow a text, by its definition: bounds hold, and published ones pass."""

import base64
import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.normalizers import NFC, NFKD, Lowercase, Replace, StripAccents

from pipeline.tokens import growth
from pipeline.tokens.tokenizer_files import encode, load_tokenizer
from tests.pipeline.sources.options import refusal

TEXTS = b"\x04\0\0\0" + bytes(4) + b"x" * 33 + b"\0y\0"
SPACE = "\u2581"


def definition(**parts) -> dict:
    """A tokenizer.json of a word, with these steps."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    for name, part in parts.items():
        if not isinstance(part, dict):
            setattr(tokenizer, name, part)
    whole = json.loads(tokenizer.to_str())
    return whole | {name: part for name, part in parts.items() if isinstance(part, dict)}


def sequence(key: str, *parts: dict) -> dict:
    return {"type": "Sequence", key: list(parts)}


def template(single: list[dict], **special: dict) -> dict:
    shape = {"single": single, "pair": [AGAIN], "special_tokens": special}
    return {"type": "TemplateProcessing"} | shape


def table(texts: bytes) -> dict:
    charsmap = base64.b64encode(texts).decode()
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


LONG = {"type": "Replace", "pattern": {"Regex": "."}, "content": "t1 " * 100_000}
TWICE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
AGAIN = {"Sequence": {"id": "A", "type_id": 0}}
SPECIAL = {"SpecialToken": {"id": "s", "type_id": 0}}
MANY = {"id": "s", "ids": [0] * 2000, "tokens": ["a"] * 2000}
BYTES = {"type": "ByteLevel"}
WORDS = BYTES | {"add_prefix_space": True, "trim_offsets": True}
HOSTILE = {
    "a long text for each character": {"normalizer": LONG},
    "forty doublings": {"normalizer": sequence("normalizers", *[TWICE] * 40)},
    "bytes of bytes": {"normalizer": sequence("normalizers", *[BYTES] * 40)},
    "between any two": {"normalizer": LONG | {"pattern": {"String": ""}}},
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "x" * 2**21}},
    "a table of long texts": {"normalizer": table(bytes(8) + b"x" * 10**5)},
    "words of bytes of bytes": {"pre_tokenizer": sequence("pretokenizers", *[WORDS] * 40)},
    "a template of copies": {"post_processor": template([AGAIN] * 10_000)},
    "copies of a template": {
        "post_processor": sequence("processors", *[template([AGAIN, AGAIN])] * 40)
    },
    "special tokens": {"post_processor": template([SPECIAL] * 2000, s=MANY)},
    "a decoder that doubles": {"decoder": sequence("decoders", *[TWICE] * 40)},
    "an unknown step": {"normalizer": {"type": "Explode"}},
    "a step without a type": {"normalizer": {"lowercase": True}},
    "no step": {"normalizer": {"type": ["Replace"]}},
    "no list": {"normalizer": {"type": "Sequence", "normalizers": 7}},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_tokenizer_that_may_fill_the_memory_is_refused_before_it_is_loaded(kind, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition(**HOSTILE[kind])))
    said = refusal(load_tokenizer, path)
    assert said.startswith(f"{path}: expected a tokenizer of the `tokenizers` library: ")
    assert len(said) < 400


ALBERT = [Replace("``", '"'), Replace("''", '"'), NFKD(), StripAccents(), Lowercase()]
PUBLISHED = {
    "Llama 2": {
        "normalizer": normalizers.Sequence([normalizers.Prepend(SPACE), Replace(" ", SPACE)]),
        "decoder": decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        ),
    },
    "Llama 3": {
        "pre_tokenizer": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel()]
        ),
        "post_processor": processors.Sequence(
            [
                processors.ByteLevel(),
                processors.TemplateProcessing("[UNK] $A", "$A $B", [("[UNK]", 1)]),
            ]
        ),
        "decoder": decoders.ByteLevel(),
    },
    "Qwen": {"normalizer": NFC(), "pre_tokenizer": pre_tokenizers.ByteLevel()},
    "BERT": {
        "normalizer": normalizers.BertNormalizer(),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "post_processor": processors.BertProcessing(("a", 0), ("a", 0)),
        "decoder": decoders.WordPiece(),
    },
    "ALBERT, which has the most steps": {
        "normalizer": sequence(
            "normalizers",
            *(json.loads(step.__getstate__()) for step in ALBERT),
            table(TEXTS),
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ),
        "pre_tokenizer": pre_tokenizers.Metaspace(),
        "decoder": decoders.Metaspace(),
    },
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_tokenizers_as_they_are_published_pass(kind):
    growth.check(definition(**PUBLISHED[kind]))


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (NFKD(), "\ufdfa"),
        (normalizers.NFKC(), "\ufdfa"),
        (normalizers.NFD(), "\u0390"),
        (NFC(), "\U0001d160"),
        (normalizers.ByteLevel(), "\u00e9"),
        (Lowercase(), "\u023a\u0130"),
        (normalizers.BertNormalizer(), "\u0390\u4e2d\u0130"),
        (Replace("aa", "bbb"), "aaaa"),
        (normalizers.Prepend("abc"), "x"),
    ],
)
def test_no_step_grows_a_text_beyond_its_bound(normalizer, text):
    step = json.loads(normalizer.__getstate__())
    factor, added = growth.NORMALIZERS[step["type"]](step)
    grown = normalizer.normalize_str(text)
    assert len(grown.encode()) <= factor * len(text.encode()) + added
    assert len(grown.encode()) > len(text.encode())


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (normalizers, growth.NORMALIZERS),
        (pre_tokenizers, growth.PRE_TOKENIZERS),
        (processors, growth.PROCESSORS),
        (decoders, growth.DECODERS),
    ],
)
def test_every_kind_of_step_that_the_library_has_is_known(module, known):
    bases = {"Normalizer", "PreTokenizer", "PostProcessor", "Decoder", "DecodeStream", "Sequence"}
    kinds = {name for name, kind in vars(module).items() if isinstance(kind, type)}
    assert kinds - bases <= known.keys()


def test_what_a_file_says_of_padding_and_cutting_does_nothing_as_with_transformers(tmp_path):
    path = tmp_path / "tokenizer.json"
    whole = definition(pre_tokenizer=pre_tokenizers.Whitespace())
    strategy = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None}
    whole["padding"] = strategy | {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    whole["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst"}
    whole["truncation"]["stride"] = 0
    path.write_text(json.dumps(whole))
    assert encode(load_tokenizer(path), "a a a", path) == [0, 0, 0]


def test_words_without_a_token_and_texts_that_are_no_unicode_are_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]")).save(str(path))
    tokenizer = load_tokenizer(path)
    assert encode(tokenizer, "a", path) == [0]
    for text in ("b", "\ud800"):
        assert refusal(encode, tokenizer, text, "the prompt").startswith("the prompt: expected a")


def test_a_key_that_stands_twice_is_refused_since_readers_differ(tmp_path):
    path = tmp_path / "tokenizer.json"
    text = json.dumps(definition())
    path.write_text(text.replace('"normalizer": null', '"normalizer": null, "normalizer": null'))
    assert "twice in a table" in refusal(load_tokenizer, path)
