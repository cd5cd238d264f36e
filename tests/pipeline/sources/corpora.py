"""A user's text and tokenizer; fetched as tokens, and as text again."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer, processors

from pipeline.runfile.data import DataText, Limit, ShuffleDontShuffle
from pipeline.sources.provider import Fetched
from pipeline.sources.text.tokenizing import END, train_tokenizer
from tests.pipeline.sources.options import fetch_into
from tests.servers.hub import Hub, Repo, running_hub

PERCENT = 30.0


def location(source: object, **fields: object) -> DataText:
    """Text of which 30 % is held out, with a small vocabulary of its own if none is given."""
    given = {"vocab_size": 270, "held_out_percent": PERCENT, "shuffle": ShuffleDontShuffle()}
    if "tokenizer" in fields:
        given["vocab_size"] = None
        if isinstance(fields["tokenizer"], Path):  # whose name is short in the fixture `here`
            fields["tokenizer"] = fields["tokenizer"].name
    return DataText(source=str(source), **given | fields)


def fetch(source: object, folder: Path, limit: Limit | None = None, **fields: object) -> Fetched:
    return fetch_into(folder, location(source, **fields), limit)


def read(folder: Path, split: str, token_size_in_bytes: int = 2) -> np.ndarray:
    paths = sorted((folder / split).iterdir())
    return np.concatenate([np.fromfile(path, f"<u{token_size_in_bytes}") for path in paths])


def texts(folder: Path, split: str, end: str = END) -> list[str]:
    """The documents of a split, decoded."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    ids = read(folder, split).tolist()
    *documents, rest = tokenizer.decode(ids, skip_special_tokens=False).split(end)
    assert rest == ""
    return documents


def every_text(folder: Path, end: str = END) -> list[str]:
    """The documents of both splits, sorted."""
    return sorted(texts(folder, "train", end) + texts(folder, "held_out", end))


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def lines_of(texts: list) -> bytes:
    return "".join(f"{json.dumps({'text': text})}\n" for text in texts).encode()


def parquet_of(texts: list, column: str = "text", **how: object) -> bytes:
    """A parquet file of row groups of 16, with a column of text and another."""
    file = io.BytesIO()
    table = pa.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, file, row_group_size=16, **how)
    return file.getvalue()


@contextmanager
def on_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, files: dict[str, bytes]
) -> Iterator[Hub]:
    """A hub that has these files as a dataset."""
    with running_hub(monkeypatch, folder / "home") as hub:
        hub.datasets[name] = Repo()
        hub.datasets[name].commit(files)
        yield hub


def stories(count: int) -> list[str]:
    return [f"Story {n}, of {'very ' * (n % 7)}many words.\n" for n in range(count)]


def write_tokenizer(folder: Path, more: int = 0, **said: object) -> Path:
    """A tokenizer's folder: bytes, some merges, <bos>, </s> and `more` added tokens."""
    folder.mkdir(parents=True)
    text = [f"{story}\n" for story in stories(30)]
    tokenizer = train_tokenizer(text, 300, "a test", "vocab_size")
    made = json.loads(tokenizer.to_str())
    made["added_tokens"] = []  # END and PAD are words like any other here
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.add_special_tokens(["<bos>", "</s>"])
    tokenizer.add_tokens([f"<extra{n}>" for n in range(more)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A </s>", special_tokens=[("<bos>", 300), ("</s>", 301)]
    )
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, value in said.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
