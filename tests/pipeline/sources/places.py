"""One place for each data location that there is, with the same tokens wherever that can be."""

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from pipeline.sources.text import corpus
from tests.pipeline.net import token_servers
from tests.pipeline.net.token_servers import HOW
from tests.pipeline.sources.corpora import on_hub, parquet_of
from tests.servers import s3 as s3_server
from tests.servers import web
from tests.servers.bucket import Bucket
from tests.servers.files import Files

VOCAB = 900
SEEDED = HOW["shuffle"]
LENGTH = 32  # tokens of a sequence in these tests


@dataclass
class Place:
    """Where tokens are.

    Attributes:
      location: as a run file has it.
      servers: that are asked.
      listed: whether it is token files as they stand, so that it can be limited and streamed.
      sure: whether each sequence comes just once.
    """

    location: dict | str
    servers: list[web.Served] = field(default_factory=list)
    listed: bool = True
    sure: bool = True

    def sent(self) -> int:
        """Bytes of files that servers have sent."""
        return sum(sum(server.sent.values()) for server in self.servers)


def token_file(number: int) -> bytes:
    """A file of tokens that no other file has in this order, and no multiple of a sequence's."""
    rng = np.random.default_rng(number)
    return rng.integers(0, VOCAB, 700 + 10 * number).astype("<u2").tobytes()


TRUTH = {f"{number}.ds": token_file(number) for number in range(4)}  # the last is held out


@contextmanager
def _local(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, content in TRUTH.items():
        (folder / name).write_bytes(content)
    yield Place({"Local": {"path": str(folder), **HOW}})


@contextmanager
def _single_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    files = Files({"0.ds": TRUTH["0.ds"]})
    with files.serving():
        yield Place({"Http": {**HOW, "location": {"SingleUrl": files.url("0.ds")}}}, [files])


def _numbers(files: Files, start: int, count: int, digits: int) -> dict:
    return {
        "url_template": files.url("{}.ds"),
        "start_index": start,
        "n_left_pad_zeros": digits,
        "num_files": count,
    }


@contextmanager
def _numbered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    files = Files({f"{name[0]:0>3}.ds": content for name, content in TRUTH.items()})
    with files.serving():
        where = {"NumberedFiles": _numbers(files, 0, len(TRUTH), 3)}
        yield Place({"Http": {**HOW, "location": where}}, [files])


def _of_kind(kind: str) -> Callable:
    @contextmanager
    def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
        with token_servers.serving(kind, TRUTH, folder / "home", monkeypatch) as source:
            if isinstance(source.server, Bucket):
                source.server.put("d-of-others/0.ds", b"12")
                source.server.put("d/readme.md", b"no tokens")
            yield Place(source.location, [source.server])

    return place


@contextmanager
def _url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with s3_server.running_s3(monkeypatch) as bucket:
        bucket.objects |= {f"tokens/{name}": content for name, content in TRUTH.items()}
        yield Place({"Url": {"url": f"s3://{bucket.name}/tokens", **HOW}}, [bucket])


def _weighted(shape: Callable[[dict, float], object], sure: bool) -> Callable:
    @contextmanager
    def place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
        files = Files(dict(TRUTH))
        with files.serving():
            # two locations: one file, and three numbered ones, of which the last is held out
            one = {**HOW, "location": {"SingleUrl": files.url("0.ds")}}
            other = {**HOW, "location": {"NumberedFiles": _numbers(files, 1, 3, 1)}}
            document = {"shuffle": SEEDED, "providers": [shape(one, 0.7), shape(other, 0.3)]}
            files.put("mix.json", json.dumps(document).encode())
            yield Place({"WeightedHttp": files.url("mix.json")}, [files], sure=sure)

    return place


@contextmanager
def _preprocessed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    import pyarrow
    from pyarrow import parquet

    for split, number in (("train", 0), ("validation", 3)):
        rows = np.frombuffer(TRUTH[f"{number}.ds"], "<u2")[: 20 * LENGTH].reshape(-1, LENGTH)
        table = pyarrow.table({"inputs": [row.tolist() for row in rows]})
        parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")
    yield Place({"Preprocessed": str(folder)}, listed=False)


@contextmanager
def _corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """What stands for the packages."""
    for n in range(20):
        (folder / f"m{n}.py").write_text("".join(f"x{i} = {i + n}\n" for i in range(60)))
    files = [
        corpus.SourceFile(path.name, path, path.stat().st_size)
        for path in sorted(folder.glob("*.py"))
    ]
    monkeypatch.setattr(corpus, "find", lambda packages: files)
    location = {"vocab_size": 300, "held_out_percent": 20.0, "shuffle": SEEDED}
    yield Place({"Corpus": location}, listed=False)


@contextmanager
def _text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Two files of JSON lines, one of them compressed."""
    for number, (name, opened) in enumerate({"l.jsonl": open, "l.jsonl.gz": gzip.open}.items()):
        with opened(folder / name, "wt", encoding="utf-8") as file:
            for line in range(200):
                text = " ".join(f"{number} {line + word}" for word in range(20))
                print(json.dumps({"text": text}), file=file)
    how = {"vocab_size": 300, "held_out_percent": 50.0, "shuffle": SEEDED}
    yield Place({"Text": {"source": str(folder), **how}}, listed=False)


@contextmanager
def _documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Parquet files with a column of text, of a dataset on the hub."""
    files = {}
    for number in range(3):
        texts = [f"{number} {line} {line * number}" for line in range(200)]
        files[f"data/{number}.parquet"] = parquet_of(texts)
    with on_hub(monkeypatch, folder, "ours/text", files) as hub:
        how = {"vocab_size": 300, "held_out_percent": 30.0, "shuffle": SEEDED}
        yield Place({"Text": {"source": "ours/text", **how}}, [hub], listed=False)


@contextmanager
def _weighted_documents(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A dataset on the hub, and twice as many sequences of a folder here."""
    with _documents(folder, monkeypatch) as place:
        given = dict(place.location["Text"])
        here = folder / "here" / "a.jsonl"
        here.parent.mkdir()
        here.write_text("".join(f'{{"text": "{n} and {n * n}"}}\n' for n in range(300)))
        both = [{"source": given.pop("source"), "weight": 1}]
        both.append({"source": str(here.parent), "weight": 2})
        location = {"WeightedText": {"sources": both, **given}}
        yield Place(location, place.servers, listed=False, sure=False)


@contextmanager
def _dummy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    yield Place("Dummy", listed=False, sure=False)


PLACES = {
    "corpus": _corpus,
    "text": _text,
    "documents": _documents,
    "weighted_documents": _weighted_documents,
    "local": _local,
    "single_url": _single_url,
    "numbered": _numbered,
    "gcp": _of_kind("bucket"),
    "hub": _of_kind("hub"),
    "url": _url,
    "weighted_by_length": _weighted(lambda location, weight: location, sure=True),
    "weighted": _weighted(lambda location, weight: [location, weight], sure=False),
    "preprocessed": _preprocessed,
    "dummy": _dummy,
}
