"""Held-out documents that stand in the train split are left out; what is trained on stays."""

import random

import numpy as np
import pytest

from lockstep.errors import LockstepError
from pipeline.runfile.data import DataWeightedText, ShuffleDontShuffle
from pipeline.sources.text import split_writer
from pipeline.sources.text.text import is_held_out
from pipeline.tokens import seen
from tests.pipeline.sources.corpora import PERCENT, fetch, lines_of, put, read, texts
from tests.pipeline.sources.options import fetch_into
from tests.pipeline.sources.test_text import sides


def document(seed: int, words: int = 60) -> str:
    """Words that no other document has in this order."""
    draw = random.Random(seed)
    return " ".join("".join(draw.choices("abcdefghij", k=5)) for _ in range(words))


def on_side(held_out: bool, first: int, count: int, beside: str = "") -> list[str]:
    found = (f"{document(seed)} {beside}" for seed in range(first, first + 10_000))
    return [text for text in found if is_held_out(text, PERCENT) is held_out][:count]


TRAIN = on_side(False, 0, 30)
NEW = on_side(True, 10_000, 8)
REPEATED = on_side(True, 20_000, 3, beside=TRAIN[4])  # half of each stands in train


def written(tmp_path, documents: list[str]):
    return put(tmp_path / "text", {"a.jsonl": lines_of(documents)})


def test_a_held_out_document_that_stands_in_train_is_left_out_and_the_rest_stays(tmp_path):
    root = written(tmp_path, [REPEATED[0], *TRAIN[:9], *NEW, *REPEATED[1:], *TRAIN[9:]])
    before, after = fetch(root, tmp_path / "a"), fetch(root, tmp_path / "b", most_seen_percent=5.0)
    train, held_out = sides(tmp_path / "a")
    assert sides(tmp_path / "b") == (train, [text for text in held_out if text not in REPEATED])
    assert {*held_out} == {*NEW, *REPEATED}
    assert after.source["documents"] == {"train": len(TRAIN), "held_out": len(NEW)}
    assert after.source["seen_in_train"] == len(REPEATED)
    assert (
        "seen_in_train" not in before.source and after.source["sha256"] == before.source["sha256"]
    )
    shares = [
        seen.share(tmp_path / name, shards) for name, shards in {"a": before, "b": after}.items()
    ]
    assert shares[0] > 0.1 and shares[1] == 0


def test_a_threshold_says_how_much_of_a_document_may_stand_in_train(tmp_path):
    root = written(tmp_path, [*TRAIN, *NEW, *REPEATED])
    fetch(root, tmp_path / "a", most_seen_percent=99.0)
    assert {*texts(tmp_path / "a", "held_out")} == {*NEW, *REPEATED}


def test_a_document_that_is_shorter_than_a_window_stays(tmp_path):
    short = [text for n in range(40) if is_held_out(text := f"yes {n}", PERCENT)]
    train = [f"{TRAIN[0]} {text}" for text in short]
    train = [text for text in train if not is_held_out(text, PERCENT)]
    assert short and train
    root = written(tmp_path, [*TRAIN, *train, *short])
    fetch(root, tmp_path / "a", most_seen_percent=0.0)
    assert texts(tmp_path / "a", "held_out") == short


def test_where_all_of_it_stands_in_train_the_key_is_named(tmp_path):
    root = written(tmp_path, [*TRAIN, *REPEATED])
    with pytest.raises(LockstepError, match="most_seen_percent is 5: .*3 held-out documents"):
        fetch(root, tmp_path / "a", most_seen_percent=5.0)


def test_a_file_ends_between_two_documents_near_the_middle(tmp_path, monkeypatch):
    monkeypatch.setattr(split_writer, "SHARD_TOKENS", 500)
    monkeypatch.setattr(seen, "CHUNK_TOKENS", 90)  # a document spans several
    fetched = fetch(written(tmp_path, [*TRAIN, *NEW]), tmp_path / "a", most_seen_percent=5.0)
    files, tokens = fetched.split("held_out"), read(tmp_path / "a", "held_out")
    borders = np.cumsum([file.tokens for file in files])[:-1]
    middle = min(borders, key=lambda border: abs(2 * border - len(tokens)))
    assert tokens[middle - 1] == 0 and abs(2 * middle - len(tokens)) < len(tokens) / len(NEW) * 1.2
    assert texts(tmp_path / "a", "held_out") == NEW


def test_a_document_of_one_source_that_stands_in_another_is_left_out(tmp_path):
    put(tmp_path / "one", {"a.jsonl": lines_of([*TRAIN[:15], *NEW[:4]])})
    put(tmp_path / "other", {"a.jsonl": lines_of([*TRAIN[15:], *NEW[4:], *REPEATED])})
    listed = tuple({"source": str(tmp_path / name), "weight": 1} for name in ("one", "other"))
    given = {"vocab_size": 270, "held_out_percent": PERCENT, "shuffle": ShuffleDontShuffle()}
    location = DataWeightedText(sources=listed, most_seen_percent=5.0, **given)
    fetched = fetch_into(tmp_path / "out", location)
    assert texts(tmp_path / "out", "held_out") == NEW
    assert [file.part for file in fetched.split("held_out")] == [0, 1]
    assert ["seen_in_train" in one for one in fetched.source["sources"]] == [False, True]
