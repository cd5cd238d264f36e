"""Large text: cut where its tokens stay the same, in memory that does not grow."""

import tracemalloc

import numpy as np
import pytest

from pipeline.sources import corpus
from pipeline.sources.text import documents, json_lines, text_file, tokenizing
from tests.pipeline.sources.corpora import fetch, read, write_lines, write_tokenizer

pytestmark = pytest.mark.usefixtures("here")


def test_a_long_document_is_cut_where_its_tokens_stay_the_same(tmp_path, monkeypatch):
    lines = [f"def f{n}(x):\n\n    y = x  \n    return y + {n}\n\n\n# {n}\n" for n in range(400)]
    (tmp_path / "a.txt").write_text("".join(lines))
    write_lines(tmp_path / "a.jsonl", *[{"text": "".join(lines)}] * 3)
    given = tmp_path / "given"
    tokenizing.save_tokenizer(tokenizing.train_tokenizer(lines, 320, "a test"), given)
    assert '"ĊĊ"' in (given / "tokenizer.json").read_text()  # two ends of lines are one token
    for name in ("a.txt", "a.jsonl"):
        fetch(tmp_path / name, tmp_path / f"{name}-whole", held_out_percent=40.0, tokenizer=given)
    for module, name in ((documents, "PIECE"), (json_lines, "PIECE"), (text_file, "BLOCK")):
        monkeypatch.setattr(module, name, 500)
    for name in ("a.txt", "a.jsonl"):
        fetch(tmp_path / name, tmp_path / f"{name}-cut", held_out_percent=40.0, tokenizer=given)
        for split in ("train", "held_out"):
            cut, whole = (read(tmp_path / f"{name}-{how}", split) for how in ("cut", "whole"))
            np.testing.assert_array_equal(cut, whole)


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
    monkeypatch.setattr(documents, "PIECE", 8)
    found = list(documents.cut(text[at : at + 8] for at in range(0, len(text), 8)))
    assert [piece.text for piece in found] == pieces
    assert [piece.ends for piece in found] == [False] * (len(pieces) - 1) + [True] * bool(pieces)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr(documents, "PIECE", 2**12)
    monkeypatch.setattr(text_file, "BLOCK", 2**12)
    monkeypatch.setattr(tokenizing, "CHARACTERS_AT_ONCE", 2**14)
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 2**16)
    given = write_tokenizer(tmp_path / "given")
    peaks = []
    for size in (2, 16):
        (tmp_path / str(size)).mkdir()
        path = tmp_path / str(size) / name
        line = '{"text": "' + "a line of text " * 20 + '"}\n'
        path.write_text(line * (200 * size))
        tracemalloc.start()
        fetch(path, tmp_path / f"out{size}", held_out_percent=5.0, tokenizer=given)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert path.stat().st_size > 900_000
    assert peaks[1] < peaks[0] + 300_000


def test_a_tokenizer_is_trained_on_the_beginning_of_a_long_text(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "TRAINED_CHARACTERS", 2000)
    begin = [{"text": "abab " * 20} for _ in range(100)]
    path = write_lines(tmp_path / "a.jsonl", *begin, *[{"text": "xyxy " * 20}] * 100)
    fetched = fetch(path, tmp_path / "out", vocab_size=260)
    tokenizer = (tmp_path / "out" / "tokenizer" / "tokenizer.json").read_text()
    assert '"ab"' in tokenizer and '"xy"' not in tokenizer
    (warning,) = fetched.warnings
    assert warning == f"{path}: the first 2,000 characters trained the tokenizer"
