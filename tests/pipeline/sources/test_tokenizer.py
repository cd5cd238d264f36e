"""Text into tokens by a tokenizer that is given, in a folder or on the hub."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from tests.pipeline.sources.corpora import (
    content,
    every_text,
    fetch,
    read,
    stories,
    texts,
    write_tokenizer,
)
from tests.pipeline.sources.options import refusal
from tests.pipeline.trained_run import make_tokenizer
from tests.servers.hub import REPO, Hub, running_hub

pytestmark = pytest.mark.usefixtures("here")
BOS = {"eos_token": "<bos>"}


def test_a_given_tokenizer_makes_the_tokens_with_its_end_behind_each_document(tmp_path, lines):
    given = write_tokenizer(tmp_path / "given")
    (given / "modeling.py").write_text("not ours")
    (given / "vocab.txt").write_text("a\n")
    fetched = fetch(lines, tmp_path / "out", tokenizer=given)
    assert (fetched.vocab_size, fetched.token_size_in_bytes) == (302, 2)
    assert every_text(tmp_path / "out", "</s>") == sorted(stories(100))
    # as the tokenizer itself has them, without <bos>, padding and truncation
    plain = Tokenizer.from_file(str(given / "tokenizer.json"))
    plain.no_padding()
    plain.no_truncation()
    first = plain.encode(texts(tmp_path / "out", "train", "</s>")[0], add_special_tokens=False).ids
    assert read(tmp_path / "out", "train")[: len(first) + 1].tolist() == [*first, 301]
    copied = content(tmp_path / "out" / "tokenizer")
    assert copied == {name: (given / name).read_bytes() for name in ("tokenizer.json", "vocab.txt")}
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in copied.items()]
    said = fetched.source["tokenizer"]
    assert said["sha256"] == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert (said["read"], said["commit"]) == ("given", None)
    assert fetched.warnings == ()


def test_a_given_tokenizer_in_an_older_form_is_converted(tmp_path, lines):
    given = tmp_path / "given"
    given.mkdir()
    before = make_tokenizer()
    before.model.save(str(given))
    said = refusal(fetch, lines, tmp_path / "out", tokenizer=given)
    assert "Text.tokenizer: given: found vocab.json without tokenizer.json, expected " in said
    (given / "config.json").write_text('{"model_type": "gpt2"}')  # says of which class it is
    fetched = fetch(lines, tmp_path / "other", tokenizer=given)
    assert every_text(tmp_path / "other", "<|endoftext|>") == sorted(stories(100))
    first = texts(tmp_path / "other", "train", "<|endoftext|>")[0]
    ids = before.encode(first).ids
    assert read(tmp_path / "other", "train")[: len(ids) + 1].tolist() == [*ids, 0]
    assert fetched.vocab_size == 258
    names = {"merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
    assert set(content(tmp_path / "other" / "tokenizer")) == names


def test_a_large_vocabulary_makes_tokens_of_four_bytes_and_is_another_source(tmp_path, lines):
    hashes = set()
    for more, size in ((2**16 - 302, 2), (2**16 - 301, 4)):
        given = write_tokenizer(tmp_path / f"given{size}", more)
        fetched = fetch(lines, tmp_path / f"out{size}", tokenizer=given)
        assert (fetched.vocab_size, fetched.token_size_in_bytes) == (302 + more, size)
        assert read(tmp_path / f"out{size}", "train", size).max() == 301
        hashes.add(fetched.source["sha256"])
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ({}, "</s>"),
        ({"tokenizer_config": BOS}, "<bos>"),
        ({"tokenizer_config": {"eos_token": {"content": "<bos>", "lstrip": False}}}, "<bos>"),
        ({"special_tokens_map": {"eos_token": {"content": "<bos>"}}}, "<bos>"),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": BOS}, "<bos>"),
        ({"tokenizer_config": {"eos_token": "</s>"}, "special_tokens_map": BOS}, "</s>"),
    ],
)
def test_the_end_token_is_the_one_that_the_tokenizer_names(tmp_path, lines, said, end):
    given = write_tokenizer(tmp_path / "given", **said)
    fetch(lines, tmp_path / "out", tokenizer=given)
    index = Tokenizer.from_file(str(given / "tokenizer.json")).token_to_id(end)
    both = np.concatenate([read(tmp_path / "out", split) for split in ("train", "held_out")])
    assert np.sum(both == index) == 100


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"eos_token": "<none>"}, "eos_token is '<none>', expected a token of the tokenizer.json"),
        ({"eos_token": 2}, "eos_token is 2, expected a string"),
        ([], "found list, expected a table"),
    ],
)
def test_an_end_token_that_is_none_is_refused(tmp_path, lines, said, expected):
    given = write_tokenizer(tmp_path / "given", tokenizer_config=said)
    message = refusal(fetch, lines, tmp_path / "out", tokenizer=given)
    assert message.startswith("given/tokenizer_config.json: ")
    assert expected in message


def test_a_link_out_of_a_tokenizers_folder_is_refused(tmp_path, lines):
    given = Path(write_tokenizer(tmp_path / "given"))
    (tmp_path / "secret").write_text("ours")
    (given / "vocab.txt").symlink_to("../secret")
    said = refusal(fetch, lines, tmp_path / "out", tokenizer=str(given))
    assert said.startswith(f"{given / 'vocab.txt'}: a link to {tmp_path}/secret")


def test_what_is_no_tokenizer_for_the_text_is_refused(tmp_path, lines):
    given = tmp_path / "given"
    given.mkdir()
    message = refusal(fetch, lines, tmp_path / "out", tokenizer=given)
    assert message.endswith("Text.tokenizer: given: found no tokenizer.json, expected one")
    (given / "tokenizer.json").write_text("{}")
    message = refusal(fetch, lines, tmp_path / "out2", tokenizer=given)
    assert message.startswith("given/tokenizer.json: expected a tokenizer")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(given / "tokenizer.json"))
    message = refusal(fetch, lines, tmp_path / "out3", tokenizer=given)
    assert "given has no token that ends a document, expected eos_token" in message
    few = Tokenizer(models.WordLevel({"</s>": 0, "Story": 1}, unk_token="[UNK]"))
    few.save(str(given / "tokenizer.json"))
    message = refusal(fetch, lines, tmp_path / "out4", tokenizer=given)
    assert message.startswith("the tokenizer cannot encode this text: ")


def test_a_sentencepiece_tokenizer_without_pre_tokenizer_works(tmp_path, lines):
    """As Llama 2's: spaces are a letter, and unknown characters are bytes."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{n:02X}>": 3 + n for n in range(256)}
    for letter in sorted({*"".join(stories(100)), "▁"} - {" ", "\n"}):
        vocab[letter] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    bytes_last = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *bytes_last])
    given = tmp_path / "given"
    given.mkdir()
    tokenizer.save(str(given / "tokenizer.json"))
    fetched = fetch(lines, tmp_path / "out", tokenizer=given)
    assert fetched.vocab_size == len(vocab)
    ids = read(tmp_path / "out", "train")
    (first,) = np.flatnonzero(ids == 2)[:1]
    assert tokenizer.decode(ids[:first].tolist()) in stories(100)


# ---- A tokenizer on the hub ----


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub(monkeypatch, tmp_path / "home") as served:
        yield served


def test_a_tokenizer_on_the_hub_is_the_one_of_its_revision(tmp_path, hub, lines):
    folders = [write_tokenizer(tmp_path / str(n), n) for n in (1, 2)]
    (folders[0] / "model.safetensors").write_bytes(b"large")
    (folders[0] / "tokenizer.py").write_text("not ours")
    old, new = (hub.add(folder) for folder in folders)
    hub.refs["v1"] = old
    cases = (old, old, 303), ("v1", old, 303), (None, new, 304)
    for number, (revision, commit, vocab_size) in enumerate(cases):
        out = tmp_path / f"out{number}"
        fetched = fetch(lines, out, tokenizer=REPO, tokenizer_revision=revision)
        assert fetched.vocab_size == vocab_size
        assert set(content(out / "tokenizer")) == {"tokenizer.json"}
        said = fetched.source["tokenizer"]
        assert (said["read"], said["revision"], said["commit"]) == (REPO, revision, commit)
        # what moves is said; a commit does not
        warned = f"is commit {commit} today; set tokenizer_revision to that"
        assert [warned in warning for warning in fetched.warnings] == [True] * (revision != commit)
    assert not [place for _, place, _ in hub.seen if "safetensors" in place or ".py" in place]


def test_a_tokenizer_that_was_fetched_is_there_without_the_hub(tmp_path, hub, lines, monkeypatch):
    hub.add(write_tokenizer(tmp_path / "given"))
    fetch(lines, tmp_path / "one", tokenizer=REPO)
    asked = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetch(lines, tmp_path / "other", tokenizer=REPO)
    assert len(hub.seen) == asked
    assert content(tmp_path / "one") == content(tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "revision"), [("ours/other", None), (REPO, "v2"), ("./no/folder", None), (REPO, None)]
)
def test_a_tokenizer_that_the_hub_does_not_have_is_refused(tmp_path, hub, lines, name, revision):
    hub.commit({"config.json": b"{}", "tokenizer/tokenizer.json": b"{}"})
    how = {"tokenizer": name, "tokenizer_revision": revision}
    message = refusal(fetch, lines, tmp_path / "out", **how)
    assert message.startswith(f"model.LLM.data_location.Text.tokenizer: {name}")
    there = name == REPO and revision is None
    assert message.endswith(
        ": found no tokenizer.json, expected one"
        if there
        else "expected a folder with a tokenizer.json, or owner/name on the hub"
    )
