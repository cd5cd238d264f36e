"""Tokenizers in older forms: what `transformers` makes of them has the same ids, or is refused."""

import io
import json
import socket
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer
from transformers.utils import logging

from pipeline.tokens.tokenizer_files import PIECES, convert_older, encode
from tests.errors import refused
from tests.pipeline.sources import options
from tests.pipeline.trained_run import make_tokenizer

TEXT = "the cat  sat on 12 mats\n é"
WORDS = ("th", "the", "Ġthe", "at")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "t"))


@pytest.fixture(autouse=True)
def nobody_is_asked(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def write_gpt2(folder: Path, **settings: object) -> Tokenizer:
    """A byte-level BPE as vocab.json and merges.txt, with a class that nothing else names."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(words=WORDS, merges=MERGES)
    tokenizer.model.save(str(folder))
    settings = {"tokenizer_class": "GPT2Tokenizer"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def refusal(folder: Path) -> str:
    said = options.refusal(convert_older, folder, "ours")
    assert not (folder / "tokenizer.json").exists()
    return said


def test_a_prompt_loses_no_character_in_silence():
    few_bytes = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    few_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert encode(few_bytes, "ab", "here") == [0, 1]
    with refused("here", 2):
        encode(few_bytes, "aéb", "here")  # of two bytes
    assert encode(make_tokenizer(), "aéb", "here")


def test_a_vocabulary_and_its_merges_become_a_tokenizer_of_the_same_ids_and_bytes(tmp_path):
    made, verbosity = [], logging.get_verbosity()
    for name in "ab":
        added = {"__type": "AddedToken", "content": "<pad>"}  # as version 4 writes it
        before = write_gpt2(tmp_path / name, pad_token=added, extra_special_tokens=["<a>"])
        convert_older(tmp_path / name, name)
        made.append((tmp_path / name / "tokenizer.json").read_bytes())
    assert made[0] == made[1]
    after = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    ids = before.encode(TEXT).ids
    assert after.encode(TEXT).ids == ids and len(ids) < len(TEXT.encode())
    assert AutoTokenizer.from_pretrained(tmp_path / "a")(TEXT)["input_ids"] == ids
    settings = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"  # of the class
    assert (settings["pad_token"], settings["tokenizer_class"]) == (added, "GPT2Tokenizer")
    assert logging.get_verbosity() == verbosity  # other tests await its warnings


def test_config_json_may_name_the_kind(tmp_path):
    before = write_gpt2(tmp_path / "a")
    (tmp_path / "a" / "tokenizer_config.json").unlink()
    (tmp_path / "a" / "config.json").write_text('{"model_type": "gpt2"}')
    convert_older(tmp_path / "a", "a")
    (tmp_path / "a" / "config.json").write_text('{"model_type": "llama"}')  # as in an export
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "a")(TEXT)["input_ids"] == before.encode(TEXT).ids
    )


def test_wordpieces_become_a_tokenizer(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    convert_older(tmp_path, "ours")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("The cats", add_special_tokens=False).ids == [5, 6, 7]


def test_sentencepieces_become_a_tokenizer_of_the_same_ids_or_are_refused(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat, the other cat did not. 123 abc"] * 3),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (tmp_path / PIECES).write_bytes(model.getvalue())
    message = refusal(tmp_path)  # without a class, transformers leaves the first space out
    assert "makes a TokenizersBackend" in message and "tokenizer_class in" in message
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    convert_older(tmp_path, "ours")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert tokenizer.encode(TEXT, add_special_tokens=False).ids == pieces.encode(TEXT)


def test_what_cannot_be_converted_is_refused(tmp_path, monkeypatch):
    write_gpt2(tmp_path / "other", tokenizer_class="LlamaTokenizer")  # would be empty
    assert refusal(tmp_path / "other") == (
        "ours: found vocab.json without tokenizer.json, expected tokenizer.model too, which a "
        "LlamaTokenizer is made from"
    )
    write_gpt2(tmp_path / "none", tokenizer_class="Nobodys")
    start = "ours: found vocab.json without tokenizer.json, expected "
    assert refusal(tmp_path / "none").startswith(
        f"{start}what transformers converts: Couldn't inst"
    )
    write_gpt2(tmp_path / "code", tokenizer_class="X", auto_map={"AutoTokenizer": ["x.X", "x.X"]})
    (tmp_path / "code" / "x.py").write_text("raise SystemExit('ran')")
    assert refusal(tmp_path / "code").startswith(f"{start}what transformers converts: ")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refusal(tmp_path / "none") == (
        f"{start}that, or transformers to convert them: pip install -c constraints.txt -e '.[hf]'"
    )


def test_a_folder_with_a_tokenizer_json_or_without_a_vocabulary_stays_as_it_is(tmp_path):
    convert_older(tmp_path, "ours")
    assert not list(tmp_path.iterdir())
    write_gpt2(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    convert_older(tmp_path / "a", "ours")
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
