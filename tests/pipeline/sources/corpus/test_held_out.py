"""What is held out of a user's files: documents, or the end of one text."""

import gzip
import json

import pytest

from tests.pipeline.sources.corpora import every_text, fetch, put, stories, texts, write_lines
from tests.pipeline.sources.options import refusal


def test_documents_of_one_file_are_held_out_by_their_number(tmp_path):
    values = [{"text": story} for story in stories(400)]
    path = write_lines(tmp_path / "a.jsonl", *values)
    fetched = fetch(path, tmp_path / "one", held_out_percent=10.0)
    train, held_out = (texts(tmp_path / "one", split) for split in ("train", "held_out"))
    assert sorted([*train, *held_out]) == sorted(stories(400))
    assert train == [story for story in stories(400) if story not in held_out]  # in their order
    lines = {story: len(json.dumps({"text": story})) + 1 for story in stories(400)}
    assert 0.09 < sum(map(lines.get, held_out)) / sum(lines.values()) <= 0.1
    assert fetched.source["held_out_within"] == ["a.jsonl"]
    # neither the words of others nor later documents change whose turn it is, but for the last ones
    write_lines(path, *({"text": story.upper()} for story in stories(400)))
    fetch(path, tmp_path / "other", held_out_percent=10.0)
    assert texts(tmp_path / "other", "held_out") == [story.upper() for story in held_out]
    write_lines(path, *({"text": story} for story in stories(800)))
    fetch(path, tmp_path / "longer", held_out_percent=10.0)
    assert len({*held_out} & {*texts(tmp_path / "longer", "held_out")}) >= len(held_out) - 3


def test_compressed_lines_give_the_texts_of_plain_ones_under_the_key_that_is_named(tmp_path):
    values = ({"body": one, "text": 5} for one in stories(200))
    plain = write_lines(tmp_path / "plain" / "a.jsonl", *values)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    fetch(tmp_path / "a.jsonl.gz", tmp_path / "one", held_out_percent=10.0, text_key="body")
    assert every_text(tmp_path / "one") == sorted(stories(200))


@pytest.mark.parametrize("percent", [0.5, 10.0, 99.0])
def test_the_end_of_one_text_is_held_out_from_a_line_on(tmp_path, percent):
    lines = [f"line {n} ü\n" for n in range(500)]
    (tmp_path / "a.txt").write_text("".join(lines))
    fetch(tmp_path / "a.txt", tmp_path / "out", held_out_percent=percent, vocab_size=258)
    (train,), (held_out,) = (texts(tmp_path / "out", split) for split in ("train", "held_out"))
    assert train + held_out == "".join(lines)
    assert held_out.startswith("line ") and train.endswith("\n")
    share = 100 * len(held_out.encode()) / (tmp_path / "a.txt").stat().st_size
    assert percent - 0.3 < share <= percent


def test_a_text_without_lines_is_cut_at_a_word(tmp_path):
    (tmp_path / "text8").write_text("word " * 999 + "last")
    fetch(tmp_path / "text8", tmp_path / "out", held_out_percent=10.0, vocab_size=258)
    (train,), (held_out,) = (texts(tmp_path / "out", split) for split in ("train", "held_out"))
    assert train + held_out == "word " * 999 + "last"
    assert held_out.startswith("word ") and 480 < len(held_out) <= 500


def test_of_few_large_files_a_part_of_each_is_held_out(tmp_path):
    folder = tmp_path / "text"
    for name in ("a", "b"):
        write_lines(folder / f"{name}.jsonl", *({"text": f"{name}{n}"} for n in range(300)))
    (folder / "README.md").write_text("x\n")  # small enough, but nothing to measure on
    fetched = fetch(folder, tmp_path / "out", held_out_percent=10.0, vocab_size=258)
    held_out = texts(tmp_path / "out", "held_out")
    assert {text[0] for text in held_out} == {"a", "b"}
    assert fetched.source["held_out_within"] == ["a.jsonl", "b.jsonl"]
    assert "x\n" in texts(tmp_path / "out", "train")


def test_what_is_too_little_to_hold_out_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("oneword\n")
    message = refusal(fetch, tmp_path / "a.txt", tmp_path / "out")
    assert message.endswith(
        "held_out_percent: found 30.0, expected enough to hold out a document or a line of a.txt"
    )
    path = write_lines(tmp_path / "a.jsonl", {"text": "one document"})
    assert "of a.jsonl" in refusal(fetch, path, tmp_path / "out2")


def test_a_file_that_is_named_as_one_to_train_on_but_for_its_split_is_held_out_whole(tmp_path):
    files = {f"wiki.{split}.txt": f"{split} of a text.\n" * 60 for split in ("train", "test")}
    files |= {"test_model.py": "import model\n" * 60}
    put(tmp_path / "text", {name: text.encode() for name, text in files.items()})
    fetched = fetch(tmp_path / "text", tmp_path / "out")
    assert "wiki.test.txt" in fetched.source["held_out_within"]
    assert "test of" not in "".join(texts(tmp_path / "out", "train"))
    assert "import model" in "".join(texts(tmp_path / "out", "train"))
