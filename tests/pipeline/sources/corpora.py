"""A user's text and tokenizer; fetched as tokens, and as text again."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer, processors

from pipeline import sources
from pipeline.runfile.data import DataCorpus, Limit, ShuffleDontShuffle
from pipeline.sources.text import (
    tokenizing,
)
from pipeline.sources.text.tokenizing import END
from tests.pipeline.sources.options import options


def location(vocab_size: int | None = 300, held_out_percent=30.0, **fields) -> DataCorpus:
    if "tokenizer" in fields:
        vocab_size = None
        if isinstance(fields["tokenizer"], Path):
            fields["tokenizer"] = fields["tokenizer"].name
    if "path" in fields:
        fields["path"] = str(fields["path"])
    return DataCorpus(
        vocab_size=vocab_size,
        held_out_percent=held_out_percent,
        shuffle=ShuffleDontShuffle(),
        **fields,
    )


def fetch(path: Path, folder: Path, limit: Limit | None = None, **fields):
    """A user's text."""
    folder.mkdir()
    where = location(**({"vocab_size": 260} | fields), path=path)
    return sources.fetch(where, folder, options(folder.parent / "store", limit))


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


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


def write_lines(path: Path, *values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), encoding="utf-8")
    return path


def parquet_of(texts: list, column: str = "text", **how: object) -> bytes:
    """A parquet file of row groups of 16, with a column of text and another."""
    file = io.BytesIO()
    table = pa.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, file, row_group_size=16, **how)
    return file.getvalue()


def stories(count: int) -> list[str]:
    return [f"Story {n}, of {'very ' * (n % 7)}many words.\n" for n in range(count)]


def write_tokenizer(folder: Path, more: int = 0, **said: object) -> Path:
    """A tokenizer's folder: bytes, some merges, <bos>, </s> and `more` added tokens."""
    folder.mkdir(parents=True)
    text = [f"{story}\n" for story in stories(30)]
    tokenizer = tokenizing.train_tokenizer(text, 300, "a test")
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
