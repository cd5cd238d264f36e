"""Text into tokens: the sources of packages, a user's files, and the tokenizers for them."""

import gzip
import hashlib
import json
import os
import socket
import tracemalloc
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from pipeline import runfile, sources
from pipeline.runfile.data import DataCorpus, Limit, ShuffleDontShuffle
from pipeline.sources import choice, corpus
from pipeline.sources.text import (
    documents,
    json_lines,
    package_sources,
    splitting,
    text_file,
    tokenizing,
)
from pipeline.sources.text.text_file import TextFile
from pipeline.sources.text.tokenizing import END
from pipeline.stage.artifacts import listing_sha256, sha256_file
from pipeline.stage.given_files import stamp
from pipeline.stage.keys import PROJECT, RUN_FILE
from pipeline.stage.progress import Progress
from tests.pipeline.sources.options import options, refusal
from tests.pipeline.trained_run import make_tokenizer
from tests.servers.hub import REPO, Hub, running_hub

BOS = {"eos_token": "<bos>"}
LETTERS = "abcdefghijklmnop"
BAR = Progress("download", total=1, unit="byte")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    """So that a tokenizer's folder has a short name."""
    monkeypatch.chdir(tmp_path)


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


@pytest.fixture
def root(tmp_path) -> Path:
    """Sixteen small sources."""
    files = {}
    for letter in LETTERS:
        lines = [f"def {letter}{n}(value, other):\n    return value + {n}\n" for n in range(9)]
        files[f"{'low' if letter < 'h' else 'high'}/{letter}.py"] = "".join(lines).encode()
    return put(tmp_path / "sources", files)


def sources_in(root: Path) -> list[TextFile]:
    """The sources below `root`, as those of the packages are."""
    return [
        TextFile(p.relative_to(root).as_posix(), p, stamp(p), 0, p.stat().st_size, errors="replace")
        for p in sorted(root.rglob("*.py"))
    ]


def fetch_sources(root: Path, folder: Path, where: DataCorpus):
    """`root` for the packages."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sysconfig.get_path", lambda name: str(root))
        patch.setattr(package_sources, "find", lambda: sources_in(root))
        return sources.fetch(where, folder, options(folder / "store"))


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


def texts(folder: Path, split: str, end: str = END, token_size_in_bytes: int = 2) -> list[str]:
    """The documents of a split, decoded."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    ids = read(folder, split, token_size_in_bytes).tolist()
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


def stories(count: int) -> list[str]:
    return [f"Story {n}, of {'very ' * (n % 7)}many words.\n" for n in range(count)]


# ---- Python's own sources ----


def test_decoded_shards_are_the_sources_each_ended_by_the_end_token(root, tmp_path):
    fetched = fetch_sources(root, tmp_path / "out", location())
    held_out = fetched.source["held_out_files"]
    train = sorted({path.relative_to(root).as_posix() for path in root.rglob("*.py")} - {*held_out})
    assert train and held_out
    for split, names in (("train", train), ("held_out", held_out)):
        assert texts(tmp_path / "out", split) == [(root / name).read_text() for name in names]


def test_golden_ids_of_a_tiny_vocabulary():
    tokenizer = tokenizing.train_tokenizer(["low lower lowest low low\n"], 262, "a test")
    end = tokenizer.token_to_id(END), tokenizer.token_to_id(tokenizing.PAD)
    assert end == (0, 1)
    words = [tokenizer.id_to_token(n) for n in range(258, 262)]
    assert words == ["lo", "low", "\u0120low", "\u0120lowe"]
    assert tokenizer.encode("low lower\n").ids == [259, 261, 83, 200]


def test_the_held_out_files_do_not_shape_the_tokenizer(root, tmp_path):
    fetched = fetch_sources(root, tmp_path / "one", location())
    # Another text of the same length, so that the split stays.
    for name in fetched.source["held_out_files"]:
        path = root / name
        path.write_text("z" * path.stat().st_size)
    changed = fetch_sources(root, tmp_path / "other", location())
    one, other = content(tmp_path / "one"), content(tmp_path / "other")
    assert [name for name in one if one[name] != other[name]] == ["held_out/00000.ds"]
    assert changed.source["sha256"] != fetched.source["sha256"]


def test_held_out_files_are_as_many_bytes_as_asked_and_stay_when_others_come(root):
    sizes = {file.name: file.size for file in sources_in(root)}
    train, held_out = splitting.split_by_file(sizes, 30.0)
    assert sorted([*train, *held_out]) == list(sizes)
    assert 0.2 < sum(sizes[name] for name in held_out) / sum(sizes.values()) <= 0.3
    # 30 % of a larger corpus are at least the files that were 30 % of this one.
    more = {**sizes, **{f"more/{n}.py": sizes["low/a.py"] for n in range(16)}}
    assert len(splitting.split_by_file(more, 30.0)[1]) > len(held_out)
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert held_out == sorted(order[: len(held_out)])


def test_a_large_file_does_not_swell_the_held_out_part():
    sizes = {f"{n}.py": 100 for n in range(100)} | {"large.py": 100_000}
    for percent in (1.0, 5.0, 10.0, 50.0):
        held_out = splitting.split_by_file(sizes, percent)[1]
        assert sum(sizes[name] for name in held_out) <= sum(sizes.values()) * percent / 100


def test_a_source_that_is_no_utf8_or_spells_a_special_token_is_text(root, tmp_path):
    odd = b"# caf\xe9 " + END.encode() + b"\r\n" * 2
    (root / "z.py").write_bytes(odd + b"x = 1\r\n" * 300)
    fetched = fetch_sources(root, tmp_path / "out", location(held_out_percent=10.0))
    assert "z.py" not in fetched.source["held_out_files"]
    ids = read(tmp_path / "out", "train")
    files = len(list(root.rglob("*.py"))) - len(fetched.source["held_out_files"])
    assert np.sum(ids == 0) == files
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    expected = f"# caf\N{REPLACEMENT CHARACTER} {END}\r\n\r\n" + "x = 1\r\n" * 300
    assert text.endswith(expected + END)


def test_shards_are_of_bounded_size_and_join_to_the_same_tokens(root, tmp_path, monkeypatch):
    fetch_sources(root, tmp_path / "one", location())
    monkeypatch.setattr(tokenizing, "SHARD_TOKENS", 100)
    monkeypatch.setattr(tokenizing, "PIECES_AT_ONCE", 3)
    many = fetch_sources(root, tmp_path / "many", location())
    paths = sorted((tmp_path / "many" / "train").iterdir())
    sizes = [path.stat().st_size // 2 for path in paths]
    assert len(sizes) > 3
    assert sizes[:-1] == [100] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= 100
    assert [file.tokens for file in many.files if file.split == "train"] == sizes
    for file in many.files:
        data = (tmp_path / "many" / file.path).read_bytes()
        assert hashlib.sha256(data).hexdigest() == file.sha256
    for split in ("train", "held_out"):
        np.testing.assert_array_equal(read(tmp_path / "one", split), read(tmp_path / "many", split))


def test_transformers_loads_the_tokenizer_with_its_special_tokens(root, tmp_path):
    fetch_sources(root, tmp_path / "out", location())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert len(tokenizer) == 300
    assert (tokenizer.bos_token, tokenizer.eos_token) == (END, END)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    text = "def  café(value):\n\treturn  value\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    said = json.loads((tmp_path / "out" / "tokenizer" / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"  # which version 4 knows too
    names = {path.name for path in (tmp_path / "out" / "tokenizer").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}


def test_the_source_is_recorded_with_its_hash(root, tmp_path):
    source = fetch_sources(root, tmp_path / "out", location()).source
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n"
        for path in root.rglob("*.py")
    ]
    assert source["sha256"] == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert source["files"] == len(LETTERS)
    assert source["bytes"] == sum(path.stat().st_size for path in root.rglob("*.py"))


def test_a_package_without_sources_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(package_sources, "PACKAGES", ("jinja2", "numpy-stubs"))
    bare = SimpleNamespace(files=None)
    with monkeypatch.context() as patch:
        patch.setattr(package_sources.metadata, "distribution", lambda name: bare)
        assert refusal(package_sources.find).startswith("jinja2: found no Python sources, expected")
    assert refusal(package_sources.describe).startswith("numpy-stubs: not installed, expected it,")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"vocab_size": 4096}, "Corpus.vocab_size: found 4096, expected at most "),
        (
            {"held_out_percent": 0.5},
            "Corpus.held_out_percent: found 0.5, expected enough to hold out one of the 16",
        ),
    ],
)
def test_more_than_the_corpus_gives_is_refused(root, tmp_path, how, said):
    message = refusal(fetch_sources, root, tmp_path / "out", location(**how))
    assert said in message
    assert str(root) in message


def test_without_a_path_it_is_the_source_of_pinned_packages_the_same_on_every_python():
    pinned = (PROJECT / "constraints.txt").read_text().lower().split()
    other = (PROJECT / "constraints-gpu.txt").read_text()
    for name in package_sources.PACKAGES:
        assert f"{name}=={metadata.version(name)}" in pinned
        assert f"\n{name}==" not in other.lower()
        assert "Tag: py3-none-any\n" in metadata.distribution(name).read_text("WHEEL")
    names = [file.name for file in package_sources.find()]
    assert names == sorted(set(names)) and {"rich/table.py", "dvc/output.py"} <= set(names)
    assert not [name for name in names if {"test", "tests"}.intersection(Path(name).parts)]


def test_the_default_run_pins_the_packages():
    contents = [(file.name, sha256_file(file.path)) for file in package_sources.find()]
    pin = runfile.load(PROJECT / RUN_FILE).pins.data
    assert listing_sha256(contents) == pin, (
        "constraints.txt has changed: set the new pins in params/"
    )


# ---- Which files of a user's are read, and how ----


def test_a_folder_is_all_its_text_and_json_lines_by_name(tmp_path):
    four = gzip.compress(b'{"text": "four", "n": 1}\n')
    files = {"b/three.md": b"# Three\r\n", "a.txt": "one ünd\n".encode(), "c.jsonl.gz": four}
    folder = put(tmp_path / "text", files | {"Z": b"five"})
    write_lines(folder / "b" / "two.jsonl", *({"text": f"line {n}\n"} for n in range(3)))
    documents = {
        "Z": ["five"],
        "a.txt": ["one ünd\n"],
        "b/three.md": ["# Three\r\n"],
        "b/two.jsonl": ["line 0\n", "line 1\n", "line 2\n"],
        "c.jsonl.gz": ["four"],
    }
    fetched = fetch(folder, tmp_path / "out", vocab_size=258)
    held_out = [documents.pop(name) for name in fetched.source["held_out_files"]]
    assert texts(tmp_path / "out", "held_out") == sum(held_out, [])
    assert texts(tmp_path / "out", "train") == sum(documents.values(), [])
    assert held_out and documents
    assert fetched.warnings == ()


def test_hidden_files_are_no_text_and_what_else_is_left_out_is_said(tmp_path):
    files = {"a.txt": b"kept\n" * 9, "b.txt": b"kept too\n" * 9, "e/empty": b""}
    files |= {".c.txt": b"hidden", ".git/d.txt": b"hidden", "f.png": b"\x89PNG\r\n\x00\x1a\xff"}
    folder = put(tmp_path / "text", files)
    outside = put(tmp_path / "outside", {"secret.txt": b"not ours\n" * 9})
    (folder / "g.txt").symlink_to(outside / "secret.txt")
    (folder / "h").symlink_to(outside)
    (folder / "i.txt").symlink_to("a.txt")  # leads to what is in the folder
    (folder / "j.txt").symlink_to("nowhere")
    (folder / "k").symlink_to(folder)  # round and round
    with socket.socket(socket.AF_UNIX) as pipe:
        pipe.bind(str(folder / "pipe"))
        fetched = fetch(folder, tmp_path / "out", vocab_size=258)
    assert fetched.source["files"] == 3
    assert {text[:5] for text in every_text(tmp_path / "out")} == {"kept\n", "kept "}
    assert fetched.warnings == (
        f"{folder}: left out 1 empty files: e/empty",
        f"{folder}: left out 2 binary files: f.png and others",
        f"{folder}: left out 4 links out of the folder: g.txt and others",
    )


def test_a_byte_order_mark_blank_lines_and_empty_texts_are_no_documents(tmp_path):
    lines = [b"\xef\xbb\xbf" + b'{"text": "first"}', b"", b'{"text": ""}', b" \t", b'{"text": "x"}']
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join([*lines, *[b'{"text": "last"}'] * 30]))
    fetch(tmp_path / "a.jsonl", tmp_path / "out", vocab_size=258)
    assert every_text(tmp_path / "out") == ["first", *["last"] * 30, "x"]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfa\nb\nc\n")
    fetch(tmp_path / "b.txt", tmp_path / "other", vocab_size=258, held_out_percent=40.0)
    assert texts(tmp_path / "other", "train") == ["a\nb\n"]
    assert texts(tmp_path / "other", "held_out") == ["c\n"]


def test_text_that_spells_a_special_token_has_none(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", *[{"text": f"a {END} b {tokenizing.PAD}"}] * 20)
    fetch(path, tmp_path / "out", vocab_size=258)
    ids = np.concatenate([read(tmp_path / "out", split) for split in ("train", "held_out")])
    assert np.sum(ids == 0) == 20
    assert np.sum(ids == 1) == 0


# ---- What is held out of a user's files ----


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


# ---- A limit ----


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


# ---- Bad text ----


def test_a_path_without_text_or_with_a_name_that_breaks_a_line_is_refused(tmp_path):
    message = refusal(fetch, tmp_path / "no", tmp_path / "out")
    assert f"Corpus.path: found no {tmp_path / 'no'}, expected a text file" in message
    (tmp_path / "folder").mkdir()
    assert refusal(fetch, tmp_path / "folder", tmp_path / "out2").endswith(
        f"found no text in {tmp_path / 'folder'}"
    )
    (tmp_path / "folder" / "a.txt").touch()
    assert "left out 1 empty files: a.txt" in refusal(fetch, tmp_path / "folder", tmp_path / "out3")
    assert "found no text in" in refusal(fetch, tmp_path / "folder" / "a.txt", tmp_path / "out4")
    put(tmp_path / "folder", {"a\nb.txt": b"text"})
    message = refusal(fetch, tmp_path / "folder", tmp_path / "out6")
    assert "found a file named 'a\\nb.txt'" in message
    path = write_lines(tmp_path / "empty.jsonl", *[{"text": ""}] * 30)
    given = write_tokenizer(tmp_path / "given")
    message = refusal(fetch, path, tmp_path / "out5", tokenizer=given)
    assert message == f"{path}: found no text in what is the train split"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "expected a JSON object: "),
        (b"{'text': 'a'}", "expected a JSON object: "),
        (b"[" * 100_000, "expected a JSON object: "),
        (b'{"text": ' + b"9" * 5000 + b"}", "expected a JSON object: "),
        (b"[1, 2]", "found a list, expected an object with the key 'text'"),
        (b'"text"', "found \"text\", expected an object with the key 'text'"),
        (b"null", "found null, expected an object with the key 'text'"),
        (b'{"Text": "a", "n": 1}', "found the keys 'Text', 'n', expected 'text' (text_key)"),
        (b"{}", "found the keys none, expected 'text' (text_key) among them"),
        (b'{"text": null}', "'text' is null, expected a string"),
        (b'{"text": ["a"]}', "'text' is a list, expected a string"),
        (b'{"text": {"a": 1}}', "'text' is an object, expected a string"),
        (b'{"text": 1.5}', "'text' is 1.5, expected a string"),
        (b'{"text": "a\xff"}', "found byte 0xff at byte 11 of the line, expected UTF-8"),
        (b'{"text": "ab\\ud800"}', "half a surrogate pair, U+D800, at character 2"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_bad_line_is_refused_with_its_file_and_number(tmp_path, line, said):
    path = tmp_path / "a.jsonl"
    good = b'{"text": "good"}\n'
    path.write_bytes(good * 2 + line + b"\n" + good * 40)
    given = write_tokenizer(tmp_path / "given")
    for name, how in (("trained", {}), ("given", {"tokenizer": given})):
        message = refusal(fetch, path, tmp_path / f"out-{name}", **how)
        assert message.startswith(f"{path}: line 3: ")
        assert said in message


def test_a_line_without_an_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "ok"}\n' + b" " * 10**6)
    message = refusal(fetch, tmp_path / "a.jsonl", tmp_path / "out")
    assert message.startswith(f"{tmp_path / 'a.jsonl'}: line 2: over 100 bytes")


@pytest.mark.parametrize("damage", ["cut", "flipped", "plain"])
def test_damaged_gzip_is_refused(tmp_path, damage):
    data = gzip.compress("".join(json.dumps({"text": s}) + "\n" for s in stories(99)).encode())
    data = {
        "cut": data[:-20],
        "flipped": data[:200] + bytes([data[200] ^ 255]) + data[201:],
        "plain": b'{"text": "plain"}\n' * 9,
    }[damage]
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    message = refusal(fetch, tmp_path / "a.jsonl.gz", tmp_path / "out")
    assert message.startswith(f"{tmp_path / 'a.jsonl.gz'}: after line ")
    assert message.endswith("expected whole gzip data")


@pytest.mark.parametrize("at", [0, 5, 4095, 4096, 4097, 8192, 8999])
def test_text_that_is_no_utf8_is_refused_with_the_byte(tmp_path, monkeypatch, at):
    monkeypatch.setattr(text_file, "BLOCK", 4096)
    data = bytearray("ä\n".encode() * 3000)
    if at == 8999:
        del data[-2:]  # ends within a character
    else:
        data[at // 3 * 3 + 1] = ord("a")  # where the second byte of ä should be
    for name, begin in (("a.txt", b""), ("mark.txt", b"\xef\xbb\xbf")):
        (tmp_path / name).write_bytes(begin + data)
        given = write_tokenizer(tmp_path / f"given-{name}")
        message = refusal(fetch, tmp_path / name, tmp_path / f"out-{name}", tokenizer=given)
        byte = len(begin) + at // 3 * 3
        assert message == f"{tmp_path / name}: found byte 0xc3 at byte {byte}, expected UTF-8"


def test_gzip_data_that_unpack_to_nothing_but_room_are_refused_soon(tmp_path):
    bomb = tmp_path / "a.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * 10**7))
    said = refusal(fetch, bomb, tmp_path / "out")
    assert said.startswith(f"{bomb}: ") and "expected at most 200 times as many of text" in said
    assert "unpack to 4194" in said  # of ten million


@pytest.mark.parametrize("when", [(tokenizing, "write_split"), (corpus, "sha256_file")])
def test_a_file_that_changes_while_it_is_read_or_hashed_is_refused(
    tmp_path, monkeypatch, lines, when
):
    found = getattr(*when)

    def append_and(*arguments):
        with open(lines, "a") as file:
            file.write('{"text": "more"}\n')
        return found(*arguments)

    monkeypatch.setattr(*when, append_and)
    assert refusal(fetch, lines, tmp_path / "out").startswith(f"{lines}: changed while it was read")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"})
    path.chmod(0)
    assert refusal(fetch, path, tmp_path / "out").startswith(f"{path}: Permission denied")


# ---- Large text ----


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


# ---- A tokenizer that is given ----


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


@pytest.fixture
def lines(tmp_path) -> Path:
    return write_lines(tmp_path / "a.jsonl", *({"text": one} for one in stories(100)))


def test_a_given_tokenizer_makes_the_tokens_with_its_end_behind_each_document(tmp_path, lines):
    given = write_tokenizer(tmp_path / "given")
    (given / "modeling.py").write_text("not ours")
    (given / "vocab.txt").write_text("a\n")
    fetched = fetch(lines, tmp_path / "out", tokenizer=given)
    assert (fetched.vocab_size, fetched.token_size_in_bytes) == (302, 2)
    assert every_text(tmp_path / "out", "</s>") == sorted(stories(100))
    # as the tokenizer itself has them, without <bos>, padding and truncation
    plain = Tokenizer.from_file(str(given / "tokenizer.json"))
    plain.no_padding()
    plain.no_truncation()
    first = plain.encode(texts(tmp_path / "out", "train", "</s>")[0], add_special_tokens=False).ids
    assert read(tmp_path / "out", "train")[: len(first) + 1].tolist() == [*first, 301]
    copied = content(tmp_path / "out" / "tokenizer")
    assert copied == {name: (given / name).read_bytes() for name in ("tokenizer.json", "vocab.txt")}
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in copied.items()]
    said = fetched.source["tokenizer"]
    assert said["sha256"] == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert (said["read"], said["commit"]) == ("given", None)
    assert fetched.warnings == ()


def test_a_given_tokenizer_in_an_older_form_is_converted(tmp_path, lines):
    given = tmp_path / "given"
    given.mkdir()
    before = make_tokenizer()
    before.model.save(str(given))
    said = refusal(fetch, lines, tmp_path / "out", tokenizer=given)
    assert "Corpus.tokenizer: given: found vocab.json without tokenizer.json, expected " in said
    (given / "config.json").write_text('{"model_type": "gpt2"}')  # says of which class it is
    fetched = fetch(lines, tmp_path / "other", tokenizer=given)
    assert every_text(tmp_path / "other", "<|endoftext|>") == sorted(stories(100))
    first = texts(tmp_path / "other", "train", "<|endoftext|>")[0]
    ids = before.encode(first).ids
    assert read(tmp_path / "other", "train")[: len(ids) + 1].tolist() == [*ids, 0]
    assert fetched.vocab_size == 258
    names = {"merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"}
    assert set(content(tmp_path / "other" / "tokenizer")) == names


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


def test_a_link_out_of_a_tokenizers_folder_is_refused(tmp_path, lines):
    given = Path(write_tokenizer(tmp_path / "given"))
    (tmp_path / "secret").write_text("ours")
    (given / "vocab.txt").symlink_to("../secret")
    said = refusal(fetch, lines, tmp_path / "out", tokenizer=str(given))
    assert said.startswith(f"{given / 'vocab.txt'}: a link to {tmp_path}/secret")


def test_what_is_no_tokenizer_for_the_text_is_refused(tmp_path, lines):
    given = tmp_path / "given"
    given.mkdir()
    message = refusal(fetch, lines, tmp_path / "out", tokenizer=given)
    assert message.endswith("Corpus.tokenizer: given: found no tokenizer.json, expected one")
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
        assert set(content(out / "tokenizer")) == {"tokenizer.json"}
        said = fetched.source["tokenizer"]
        assert (said["read"], said["revision"], said["commit"]) == (REPO, revision, commit)
        # what moves is said; a commit does not
        warned = f"is commit {commit} today; set tokenizer_revision to that"
        assert [warned in warning for warning in fetched.warnings] == [True] * (revision != commit)
    assert not [place for _, place, _ in hub.seen if "safetensors" in place or ".py" in place]


def test_a_tokenizer_that_was_fetched_is_there_without_the_hub(tmp_path, hub, lines, monkeypatch):
    hub.add(write_tokenizer(tmp_path / "given"))
    fetch(lines, tmp_path / "one", tokenizer=REPO)
    asked = len(hub.seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    fetch(lines, tmp_path / "other", tokenizer=REPO)
    assert len(hub.seen) == asked
    assert content(tmp_path / "one") == content(tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "revision"), [("ours/other", None), (REPO, "v2"), ("./no/folder", None), (REPO, None)]
)
def test_a_tokenizer_that_the_hub_does_not_have_is_refused(tmp_path, hub, lines, name, revision):
    hub.commit({"config.json": b"{}", "tokenizer/tokenizer.json": b"{}"})
    how = {"tokenizer": name, "tokenizer_revision": revision}
    message = refusal(fetch, lines, tmp_path / "out", **how)
    assert message.startswith(f"model.LLM.data_location.Corpus.tokenizer: {name}")
    there = name == REPO and revision is None
    assert message.endswith(
        ": found no tokenizer.json, expected one"
        if there
        else "expected a folder with a tokenizer.json, or owner/name on the hub"
    )
