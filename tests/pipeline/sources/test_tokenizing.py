"""Documents into shards: cut where tokens stay the same, in memory that does not grow, limited."""

import tracemalloc

import numpy as np
import pytest

from pipeline.runfile.data import Limit
from pipeline.sources.text import documents, tokenizing
from pipeline.sources.text.tokenizing import END, PAD, train_tokenizer
from pipeline.sources.token_files import listing
from pipeline.tokens.tokenizer_files import save_tokenizer
from tests.pipeline.sources.corpora import fetch, lines_of, put, read, stories, write_tokenizer

pytestmark = pytest.mark.usefixtures("here")


def test_golden_ids_of_a_tiny_vocabulary():
    tokenizer = train_tokenizer(["low lower lowest low low\n"], 262, "a test", "vocab_size")
    assert (tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)) == (0, 1)
    words = [tokenizer.id_to_token(n) for n in range(258, 262)]
    assert words == ["lo", "low", "\u0120low", "\u0120lowe"]
    assert tokenizer.encode("low lower\n").ids == [259, 261, 83, 200]


def test_text_that_spells_a_special_token_has_none(tmp_path):
    path = put(tmp_path, {"a.jsonl": lines_of([f"a {END} b {PAD} {n}" for n in range(20)])})
    fetch(path / "a.jsonl", tmp_path / "out", vocab_size=258)
    ids = np.concatenate([read(tmp_path / "out", split) for split in ("train", "held_out")])
    assert np.sum(ids == 0) == 20
    assert np.sum(ids == 1) == 0


def test_a_long_document_is_cut_where_its_tokens_stay_the_same(tmp_path, monkeypatch):
    lines = [f"def f{n}(x):\n\n    y = x  \n    return y + {n}\n\n\n# {n}\n" for n in range(400)]
    text = [f"# {n}\n" + "".join(lines) for n in range(5)]
    folder = put(tmp_path / "text", {"a.jsonl": lines_of(text), "b.txt": text[0].encode()})
    tokenizer, given = train_tokenizer(lines, 320, "a test", "vocab_size"), tmp_path / "given"
    save_tokenizer(tokenizer, given, {"eos_token": END})
    assert '"ĊĊ"' in (given / "tokenizer.json").read_text()  # two ends of lines are one token
    fetch(folder, tmp_path / "whole", held_out_percent=40.0, tokenizer=given)
    monkeypatch.setattr(tokenizing, "PIECE", 500)
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
    monkeypatch.setattr(tokenizing, "PIECE", 8)
    found = list(tokenizing.cut(text))
    assert [piece.text for piece in found] == pieces
    assert [piece.ends for piece in found] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr(tokenizing, "PIECE", 2**12)
    monkeypatch.setattr(tokenizing, "CHARACTERS_AT_ONCE", 2**14)
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 2**16)
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
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 300)
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
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 300)  # 4 sequences of 64 tokens, and 44 tokens
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
