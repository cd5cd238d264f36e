"""Documents of several sources, mixed by weight: each source is what it is alone."""

import numpy as np
import pytest

from pipeline import sources
from pipeline.runfile.data import DataWeightedText, Limit, ShuffleDontShuffle
from pipeline.sources.text.text import is_held_out
from pipeline.tokens import sequences
from pipeline.tokens.shards import Shards, write_shards
from tests.pipeline.sources.corpora import (
    PERCENT,
    fetch,
    lines_of,
    on_hub,
    parquet_of,
    put,
    stories,
    texts,
    write_tokenizer,
)
from tests.pipeline.sources.options import fetch_into, options, refusal

FIRST, SECOND = stories(150)[:90], [f"and {story}" for story in stories(150)[90:]]
LENGTH, END_OF_TEXT = 16, "</s>"


@pytest.fixture
def tokenizer(tmp_path):
    return str(write_tokenizer(tmp_path / "tokenizer"))


@pytest.fixture
def here(tmp_path):
    put(tmp_path / "first", {"a.parquet": parquet_of(FIRST)})
    put(tmp_path / "second", {"b.jsonl": lines_of(SECOND)})
    return [str(tmp_path / name) for name in ("first", "second")]


def mixed(given: list[str], weights: list[float], **fields) -> DataWeightedText:
    fields = {"held_out_percent": PERCENT, "shuffle": ShuffleDontShuffle()} | fields
    listed = tuple({"source": s, "weight": w} for s, w in zip(given, weights, strict=True))
    return DataWeightedText(sources=listed, **fields)


def tokens_of(folder, shards: Shards, part: int) -> np.ndarray:
    files = [file for file in shards.split("train") if file.part == part]
    return np.concatenate([np.fromfile(folder / file.path, "<u2") for file in files])


def test_each_source_has_the_tokens_that_it_has_alone_and_its_weight(tmp_path, tokenizer, here):
    shards = fetch_into(tmp_path / "both", mixed(here, [3, 1], tokenizer=tokenizer))
    assert [part.weight for part in shards.parts] == [3, 1]
    for part, (source, written) in enumerate(zip(here, (FIRST, SECOND), strict=True)):
        alone = tmp_path / f"alone-{part}"
        found = fetch(source, alone, tokenizer=tokenizer)
        np.testing.assert_array_equal(
            tokens_of(tmp_path / "both", shards, part), tokens_of(alone, found, 0)
        )
        listed = shards.source["sources"][part]
        assert listed["read"] == source
        assert sum(listed["documents"].values()) == len(written)
    aside = [text for text in FIRST + SECOND if is_held_out(text, PERCENT)]
    assert sorted(texts(tmp_path / "both", "held_out", END_OF_TEXT)) == sorted(aside)


def test_training_reads_sequences_of_the_sources_by_their_weights(tmp_path, tokenizer, here):
    folder = tmp_path / "both"
    shards = fetch_into(folder, mixed(here, [3, 1], tokenizer=tokenizer))
    write_shards(folder, shards)
    rows = sequences.Sequences(folder, shards, "train", LENGTH)
    first = {row.tobytes() for row in cut(tokens_of(folder, shards, 0))}
    drawn = rows.take(np.arange(40))
    of_first = [row.astype("<u2").tobytes() in first for row in drawn]
    assert sum(of_first) == 30 and 8 <= sum(of_first[:12]) <= 10


def cut(tokens: np.ndarray) -> np.ndarray:
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


@pytest.mark.parametrize("limit", [Limit(tokens=400), Limit(steps=5, batch=5, max_seq_len=LENGTH)])
def test_a_limit_is_divided_by_weight(tmp_path, tokenizer, here, limit):
    shards = fetch_into(tmp_path / "both", mixed(here, [3, 1], tokenizer=tokenizer), limit)
    counts = [sum(f.tokens for f in shards.split("train") if f.part == part) for part in (0, 1)]
    assert sum(counts) >= 400  # a source's part is rounded up, by a sequence more where they count
    assert counts == pytest.approx([300, 100], abs=2 * LENGTH)


def test_a_tokenizer_is_trained_on_all_sources(tmp_path, here):
    shards = fetch_into(tmp_path / "both", mixed(here, [1, 1], vocab_size=300))
    assert shards.vocab_size == 300 and {file.part for file in shards.split("train")} == {0, 1}


def test_sources_may_lie_anywhere_and_what_is_wrong_is_said_of_the_one(tmp_path, monkeypatch, here):
    with on_hub(monkeypatch, tmp_path, "ours/web", {"x.jsonl": lines_of(FIRST)}):
        both = mixed([here[1], "ours/web"], [1, 2.5], vocab_size=270)
        found = sources.survey(both, options(tmp_path / "store"))
        assert [file.name for file in found.files] == ["b.jsonl", "x.jsonl"]
        shards = fetch_into(tmp_path / "both", both)
        assert shards.source["sources"][1]["repo_id"] == "ours/web"
    bad = mixed([here[0], str(tmp_path / "nowhere")], [1, 1], vocab_size=270)
    line = refusal(fetch_into, tmp_path / "bad", bad)
    assert line.startswith("model.LLM.data_location.WeightedText.sources[1]: found no ")
