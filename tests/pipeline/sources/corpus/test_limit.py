"""A limit: the first tokens, steps or files of those without it, and no more work."""

import numpy as np
import pytest

from pipeline import sources
from pipeline.runfile.data import Limit
from pipeline.sources import choice, corpus
from pipeline.sources.text import tokenizing
from tests.pipeline.sources.corpora import (
    fetch,
    location,
    put,
    read,
    stories,
    texts,
    write_lines,
    write_tokenizer,
)
from tests.pipeline.sources.options import options

pytestmark = pytest.mark.usefixtures("here")


def test_a_limit_of_tokens_is_the_first_of_those_without_it(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", *({"text": one} for one in stories(400)))
    whole = fetch(path, tmp_path / "whole")
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 300)
    few = fetch(path, tmp_path / "few", Limit(tokens=1000))
    assert [file.tokens for file in few.files if file.split == "train"] == [300, 300, 300, 100]
    for split, most in (("train", 1000), ("held_out", None)):
        expected = read(tmp_path / "whole", split)[:most]
        np.testing.assert_array_equal(read(tmp_path / "few", split), expected)
    assert few.source["sha256"] == whole.source["sha256"]
    monkeypatch.setattr(choice, "HELD_OUT_TOKENS", 200)
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
    assert corpus.most_tokens(Limit(steps=1, batch=1, max_seq_len=301), "train") is None


def test_a_limit_of_files_leaves_the_others_unread(tmp_path):
    folder = put(tmp_path / "text", {f"{n}.txt": b"file %d\n" % n for n in range(10)})
    whole = fetch(folder, tmp_path / "whole", vocab_size=258)
    train, held_out = (texts(tmp_path / "whole", split) for split in ("train", "held_out"))
    assert len(train) == 7
    few = fetch(folder, tmp_path / "few", Limit(files=2), vocab_size=258)
    assert texts(tmp_path / "few", "train") == train[:2]
    assert texts(tmp_path / "few", "held_out") == held_out
    assert few.source["files"] == 2 + 3
    assert few.source["sha256"] != whole.source["sha256"]


def test_a_limit_stops_the_work_when_there_is_enough(tmp_path, monkeypatch):
    files = dict.fromkeys(("b.txt", "c.txt"), b"word " * 1000)
    folder = put(tmp_path / "text", files | {"d.txt": b"\xff" * 9000})  # d.txt would be refused
    write_lines(folder / "a.jsonl", *({"text": one} for one in stories(300)))
    monkeypatch.setattr(tokenizing, "PIECES_AT_ONCE", 10)
    given = write_tokenizer(tmp_path / "given")
    fetched = fetch(
        folder, tmp_path / "out", Limit(tokens=50), held_out_percent=20.0, tokenizer=given
    )
    assert "d.txt" not in fetched.source["held_out_files"]
    assert fetched.source["files"] == 1 + len(fetched.source["held_out_files"])


def test_a_survey_tells_the_files_and_reads_none(tmp_path):
    files = {f"{n}.txt": b"\xff" * 100 for n in range(10)}  # fetching would refuse them
    folder = put(tmp_path / "text", files | {"empty": b""})
    where = location(path=folder)
    whole = sources.survey(where, options(tmp_path))
    assert (whole.read, whole.train_files) == (str(folder), 7)
    assert [file.split for file in whole.files] == ["train"] * 7 + ["held_out"] * 3
    assert {(file.size, file.tokens) for file in whole.files} == {(100, None)}
    assert whole.warnings == (f"{folder}: left out 1 empty files: empty",)
    few = sources.survey(where, options(tmp_path, Limit(files=2)))
    assert few.files == whole.files[:2] + whole.files[7:]
    assert few.train_files == 7
    (tmp_path / "one.txt").write_bytes(b"\xff" * 1000)
    one = sources.survey(location(path=tmp_path / "one.txt"), options(tmp_path))
    assert [(file.split, file.size) for file in one.files] == [("train", 700), ("held_out", 300)]
