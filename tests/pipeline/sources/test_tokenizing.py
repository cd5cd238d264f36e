"""Text into tokens, by a tokenizer that is trained or given: pieces, limits, bounded memory."""

import hashlib
import json
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from pipeline.runfile.data import Limit
from pipeline.sources.text import documents, split_writer, tokenizing
from pipeline.sources.text.tokenizing import END, PAD, train_tokenizer
from pipeline.sources.token_files import listing
from pipeline.tokens.tokenizer_files import save_tokenizer
from pipeline.weights import text_settings
from tests import tiny
from tests.pipeline.sources.corpora import (
    every_text,
    fetch,
    lines_of,
    put,
    read,
    stories,
    write_tokenizer,
)
from tests.pipeline.sources.options import refusal
from tests.pipeline.trained_run import make_tokenizer
from tests.servers.hub import REPO, Hub, running_hub

pytestmark = pytest.mark.usefixtures("here")


def test_golden_ids_of_a_tiny_vocabulary():
    tokenizer = train_tokenizer(["low lower lowest low low\n"], 262, "a test", "vocab_size")
    assert (tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)) == (0, 1)
    words = [tokenizer.id_to_token(n) for n in range(258, 262)]
    assert words == ["lo", "low", "\u0120low", "\u0120lowe"]
    assert tokenizer.encode("low lower\n").ids == [259, 261, 83, 200]


@pytest.mark.parametrize("unknown", [None, "<unk>"])
def test_characters_without_a_token_are_counted(tmp_path, unknown):
    vocab = {token: number for number, token in enumerate(["<unk>", END, "a", "b", " ", "ab"])}
    bpe = models.BPE(vocab=vocab, merges=[("a", "b")], unk_token=unknown)
    save_tokenizer(Tokenizer(bpe), tmp_path / "given", {"eos_token": END})
    documents = ["ab ba", "abx, ax\u00e9b"] * 20
    folder = put(tmp_path / "text", {"a.jsonl": lines_of(documents)})
    fetched = fetch(folder, tmp_path / "out", held_out_percent=50.0, tokenizer=tmp_path / "given")
    assert fetched.source["without_token"] == 20 * len("x,x\u00e9")
    assert any("80 " in line and str(unknown or "left out") in line for line in fetched.warnings)
    tokens = np.concatenate([read(tmp_path / "out", split) for split in ("train", "held_out")])
    assert (tokens == 0).sum() == (0 if unknown is None else 80)
    with_all_bytes = fetch(folder, tmp_path / "bytes", held_out_percent=50.0, vocab_size=262)
    assert "without_token" not in with_all_bytes.source


def test_a_long_document_is_cut_where_its_tokens_stay_the_same(tmp_path, monkeypatch):
    lines = [f"def f{n}(x):\n\n    y = x  \n    return y + {n}\n\n\n# {n}\n" for n in range(400)]
    text = [f"# {n}\n" + "".join(lines) for n in range(5)]
    folder = put(tmp_path / "text", {"a.jsonl": lines_of(text), "b.txt": text[0].encode()})
    tokenizer, given = train_tokenizer(lines, 320, "a test", "vocab_size"), tmp_path / "given"
    save_tokenizer(tokenizer, given, {"eos_token": END})
    assert '"ĊĊ"' in (given / "tokenizer.json").read_text()  # two ends of lines are one token
    fetch(folder, tmp_path / "whole", held_out_percent=40.0, tokenizer=given)
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 500)
    fetch(folder, tmp_path / "cut", held_out_percent=40.0, tokenizer=given)
    for split in ("train", "held_out"):
        found, expected = (read(tmp_path / name, split) for name in ("cut", "whole"))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", []),
        ("abcdefgh", ["abcdefgh"]),
        ("abcdefghi", ["abcdefgh", "i"]),
        ("ab\ncd\nefg\n", ["ab\ncd\n", "efg\n"]),
        ("ab\ncd\n\n  efg", ["ab\n", "cd", "\n\n  efg"]),
        ("abcd\n\nef gh", ["abcd", "\n\nef gh"]),
        ("ab cd efgh", ["ab cd", " efgh"]),
        ("\n\n\n\n\n\n\n\n\n", ["\n" * 8, "\n"]),
    ],
)
def test_pieces_begin_with_lines_or_else_words(monkeypatch, text, pieces):
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 8)
    found = list(tokenizing.cut(text))
    assert [piece.text for piece in found] == pieces
    assert [piece.ends for piece in found] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tokenizing, "PIECE_CHARACTERS", 2**12)
    monkeypatch.setattr(tokenizing, "CHARACTERS_AT_ONCE", 2**14)
    monkeypatch.setattr(split_writer, "SHARD_TOKENS", 2**16)
    given = write_tokenizer(tmp_path / "given")
    peaks = []
    for size in (2, 16):
        lines = ['{"text": "' + f"{n} a line of text " * 20 + '"}\n' for n in range(200 * size)]
        path = put(tmp_path / str(size), {name: "".join(lines).encode()}) / name
        tracemalloc.start()
        fetch(path, tmp_path / f"out{size}", tokenizer=given)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert path.stat().st_size > 900_000
    assert peaks[1] < peaks[0] + 300_000


def test_a_tokenizer_is_trained_on_the_beginning_of_a_long_text(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "TRAINED_CHARACTERS", 2000)
    some = [f"abab {n} " * 10 for n in range(300)] + [f"xyxy {n} " * 10 for n in range(100)]
    path = put(tmp_path, {"a.jsonl": lines_of(some)}) / "a.jsonl"
    fetched = fetch(path, tmp_path / "out", vocab_size=260)
    tokenizer = (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text()
    assert '"ab"' in tokenizer and '"xy"' not in tokenizer
    (warning,) = fetched.warnings
    assert warning.startswith(f"{path}: the first 2,0")


# ---- Limits ----


def test_a_limit_of_tokens_is_the_first_of_those_without_it(tmp_path, monkeypatch):
    path = put(tmp_path, {"a.jsonl": lines_of(stories(400))}) / "a.jsonl"
    whole = fetch(path, tmp_path / "whole")
    monkeypatch.setattr(split_writer, "SHARD_TOKENS", 300)
    few = fetch(path, tmp_path / "few", Limit(tokens=1000))
    assert [file.tokens for file in few.files if file.split == "train"] == [300, 300, 300, 100]
    for split, most in (("train", 1000), ("held_out", None)):
        expected = read(tmp_path / "whole", split)[:most]
        np.testing.assert_array_equal(read(tmp_path / "few", split), expected)
    assert few.source["sha256"] == whole.source["sha256"]
    monkeypatch.setattr(listing, "HELD_OUT_TOKENS", 200)
    fetch(path, tmp_path / "fewer", Limit(tokens=1000))
    assert len(read(tmp_path / "fewer", "held_out")) == 200


@pytest.mark.parametrize(("steps", "tokens"), [(1, 64), (4, 300 - 44 + 44), (5, 364), (9, 664)])
def test_a_limit_of_steps_is_whole_sequences_though_shards_end_in_half_ones(
    tmp_path, monkeypatch, lines, steps, tokens
):
    monkeypatch.setattr(
        split_writer, "SHARD_TOKENS", 300
    )  # 4 sequences of 64 tokens, and 44 tokens
    limit = Limit(steps=steps, batch=1, max_seq_len=64)
    fetched = fetch(lines, tmp_path / "out", limit)
    sizes = [file.tokens for file in fetched.files if file.split == "train"]
    assert sum(size // 64 for size in sizes) == steps
    assert sum(sizes) == tokens
    assert tokenizing.most_tokens(Limit(steps=1, batch=1, max_seq_len=301), "train") is None


# ---- A text file that is the only one ----


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"line {n} ü\n" for n in range(9000)),  # as tiny Shakespeare
        "word " * 20_000 + "last",  # as text8
        "字" * 30_000,
        "\ufeffshort",
    ],
    ids=["lines", "words", "characters", "short"],
)
def test_a_text_that_is_the_only_file_is_cut_into_documents(tmp_path, text):
    path = put(tmp_path, {"text": text.encode()}) / "text"
    left_out = documents.Counter()
    found = [*documents.documents(path, str(path), "text", left_out, alone=True)]
    assert "".join(found) == text.removeprefix("\ufeff") and not left_out
    assert max(len(one.encode()) for one in found) < 2 * documents.PART_BYTES
    assert len(found) >= len(text.encode()) // documents.PART_BYTES // 2
    if "\n" in text:
        assert all(one.endswith("\n") for one in found)


def test_some_of_a_text_that_is_the_only_file_is_held_out(tmp_path):
    lines = [f"line {n} ü\n" for n in range(9000)]
    put(tmp_path, {"text": "".join(lines).encode()})
    fetched = fetch(tmp_path / "text", tmp_path / "out", vocab_size=258)
    counts = fetched.source["documents"]
    assert counts["held_out"] > 3 and counts["train"] > 10
    files = {f"{n}.txt": b"%d " % n + "".join(lines).encode() for n in range(8)}
    several = fetch(put(tmp_path / "more", files), tmp_path / "other", vocab_size=258)
    assert sum(several.source["documents"].values()) == 8  # each file is one document


# ---- A tokenizer that is given ----


BOS = {"eos_token": "<bos>"}


def test_a_given_tokenizer_makes_the_tokens_with_its_end_behind_each_document(tmp_path, lines):
    given = write_tokenizer(tmp_path / "given")
    (given / "modeling.py").write_text("not ours")
    (given / "vocab.txt").write_text("a\n")
    fetched = fetch(lines, tmp_path / "out", tokenizer=given)
    assert (fetched.vocab_size, fetched.token_size_in_bytes) == (302, 2)
    assert every_text(tmp_path / "out", "</s>") == sorted(stories(100))
    copied = tiny.contents(tmp_path / "out" / "tokenizer")
    assert json.loads(copied.pop("tokenizer_config.json"))["eos_token"] == "</s>"  # unnamed there
    assert copied == {name: (given / name).read_bytes() for name in ("tokenizer.json", "vocab.txt")}
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in copied.items()]
    said = fetched.source["tokenizer"]
    assert said["sha256"] == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert (said["read"], said["commit"]) == ("given", None)
    assert fetched.warnings == ()


def test_a_given_tokenizer_in_an_older_form_is_converted(tmp_path, lines):
    given = tmp_path / "given"
    given.mkdir()
    make_tokenizer().model.save(str(given))
    said = refusal(fetch, lines, tmp_path / "out", tokenizer=given)
    assert "Text.tokenizer: given: found vocab.json without tokenizer.json, expected " in said
    (given / "config.json").write_text('{"model_type": "gpt2"}')  # says of which class it is
    fetched = fetch(lines, tmp_path / "other", tokenizer=given)
    assert every_text(tmp_path / "other", "<|endoftext|>") == sorted(stories(100))
    assert fetched.vocab_size == 258
    names = {"merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
    assert set(tiny.contents(tmp_path / "other" / "tokenizer")) == names


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
    copied = tmp_path / "out" / "tokenizer"  # the export says so too, and its texts end there
    tokenizer = Tokenizer.from_file(str(copied / "tokenizer.json"))
    assert text_settings.special_tokens(copied, tokenizer)["eos_token_id"] == index


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
        names = {"tokenizer.json", "tokenizer_config.json"}
        assert set(tiny.contents(out / "tokenizer")) == names
        said = fetched.source["tokenizer"]
        assert (said["read"], said["revision"], said["commit"]) == (REPO, revision, commit)
        # what moves is said; a commit does not
        warned = f"is commit {commit} today; set tokenizer_revision to that"
        assert [warned in warning for warning in fetched.warnings] == [True] * (revision != commit)
    assert not [place for _, place, _ in hub.seen if "safetensors" in place or ".py" in place]


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
