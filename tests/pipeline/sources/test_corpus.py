"""The source of pinned packages as tokens: their tokenizer, and which files are held out."""

import hashlib
import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from lockstep.files import sha256_file
from pipeline import runfile, sources
from pipeline.runfile.data import DataCorpus, Limit, ShuffleDontShuffle
from pipeline.sources.text import corpus, tokenizing
from pipeline.sources.text.tokenizing import END
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.keys import PROJECT, RUN_FILE
from pipeline.tokens import seen
from pipeline.toml_file import read_toml
from tests import tiny
from tests.errors import refused
from tests.pipeline.sources.corpora import put, read, texts
from tests.pipeline.sources.options import fetch_into, options, refusal

LETTERS = "abcdefghijklmnop"


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Sixteen small sources, for those of the packages."""
    files = {}
    for letter in LETTERS:
        lines = [f"def {letter}{n}(value, other):\n    return value + {n}\n" for n in range(9)]
        files[f"{'low' if letter < 'h' else 'high'}/{letter}.py"] = "".join(lines).encode()
    folder = put(tmp_path / "sources", files)
    monkeypatch.setattr(corpus, "find", lambda packages: sources_in(folder))
    return folder


def sources_in(root: Path) -> list[corpus.SourceFile]:
    return [
        corpus.SourceFile(path.relative_to(root).as_posix(), path, path.stat().st_size)
        for path in sorted(root.rglob("*.py"))
    ]


def location(**fields) -> DataCorpus:
    given = {"vocab_size": 300, "held_out_percent": 30.0, "shuffle": ShuffleDontShuffle()}
    return DataCorpus(**given | fields)


def fetch(folder: Path, limit: Limit | None = None, **fields):
    return fetch_into(folder, location(**fields), limit)


def test_decoded_shards_are_the_sources_each_ended_by_the_end_token(root, tmp_path):
    held_out = fetch(tmp_path / "out").source["held_out_files"]
    train = sorted({file.name for file in sources_in(root)} - {*held_out})
    assert train and held_out
    for split, names in (("train", train), ("held_out", held_out)):
        assert texts(tmp_path / "out", split) == [(root / name).read_text() for name in names]


def test_the_held_out_files_do_not_shape_the_tokenizer(root, tmp_path):
    fetched = fetch(tmp_path / "one")
    # Another text of the same length, so that the split stays.
    for name in fetched.source["held_out_files"]:
        path = root / name
        path.write_text("z" * path.stat().st_size)
    changed = fetch(tmp_path / "other")
    one, other = tiny.contents(tmp_path / "one"), tiny.contents(tmp_path / "other")
    assert [name for name in one if one[name] != other[name]] == ["held_out/00000.ds"]
    assert changed.source["sha256"] != fetched.source["sha256"]


def test_held_out_files_are_as_many_bytes_as_asked_and_stay_when_others_come(root):
    sizes = {file.name: file.size for file in sources_in(root)}
    held_out = corpus.held_out_of(sizes, 30.0)
    assert 0.2 < sum(sizes[name] for name in held_out) / sum(sizes.values()) <= 0.3
    # 30 % of a larger corpus are at least the files that were 30 % of this one.
    more = {**sizes, **{f"more/{n}.py": sizes["low/a.py"] for n in range(16)}}
    assert len(corpus.held_out_of(more, 30.0)) > len(held_out)
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert held_out == order[: len(held_out)]


def test_a_large_file_does_not_swell_the_held_out_part():
    sizes = {f"{n}.py": 100 for n in range(100)} | {"large.py": 100_000}
    for percent in (1.0, 5.0, 10.0, 50.0):
        held_out = corpus.held_out_of(sizes, percent)
        assert sum(sizes[name] for name in held_out) <= sum(sizes.values()) * percent / 100


def test_a_source_that_is_no_utf8_or_spells_a_special_token_is_text(root, tmp_path):
    odd = b"# caf\xe9 " + END.encode() + b"\r\n" * 2
    (root / "z.py").write_bytes(odd + b"x = 1\r\n" * 300)
    fetched = fetch(tmp_path / "out", held_out_percent=10.0)
    assert "z.py" not in fetched.source["held_out_files"]
    ids = read(tmp_path / "out", "train")
    files = len(sources_in(root)) - len(fetched.source["held_out_files"])
    assert np.sum(ids == 0) == files
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    expected = f"# caf\N{REPLACEMENT CHARACTER} {END}\r\n\r\n" + "x = 1\r\n" * 300
    assert text.endswith(expected + END)


def test_transformers_loads_the_tokenizer_with_its_special_tokens(root, tmp_path):
    fetch(tmp_path / "out")
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
    source = fetch(tmp_path / "out").source
    files = sources_in(root)
    assert source["sha256"] == listing_sha256((one.name, sha256_file(one.path)) for one in files)
    assert sources.source_sha256(location(), options(tmp_path)) == source["sha256"]
    assert source["files"] == len(LETTERS)
    assert source["bytes"] == sum(file.size for file in files)


def test_a_limit_of_files_is_on_those_to_train_on(root, tmp_path):
    fetch(tmp_path / "whole")
    train, held_out = (texts(tmp_path / "whole", split) for split in ("train", "held_out"))
    few = fetch(tmp_path / "few", Limit(files=2), vocab_size=270)
    assert texts(tmp_path / "few", "train") == train[:2]
    assert texts(tmp_path / "few", "held_out") == held_out
    assert few.source["files"] == 2 + len(held_out)
    survey = sources.survey(location(), options(tmp_path, Limit(files=2)))
    assert [file.split for file in survey.files] == ["train"] * 2 + ["held_out"] * len(held_out)
    assert survey.train_files == len(train)
    assert sources.source_sha256(location(), options(tmp_path, Limit(files=2))) is None


def test_a_file_that_changes_while_it_is_read_is_refused(root, tmp_path, monkeypatch):
    write = tokenizing.SplitWriter.close

    def append_and(writer):
        (root / "low" / "a.py").write_text("more")
        write(writer)

    monkeypatch.setattr(tokenizing.SplitWriter, "close", append_and)
    assert refusal(fetch, tmp_path / "out").startswith(f"{root / 'low' / 'a.py'}: changed")


def test_a_package_without_sources_is_refused_with_its_name(monkeypatch):
    monkeypatch.setattr(corpus, "PACKAGES", ("numpy-stubs",))
    assert refusal(corpus.find).startswith("numpy-stubs: not installed, ")
    monkeypatch.setattr(corpus, "PACKAGES", ("jinja2",))
    bare = SimpleNamespace(files=None)
    monkeypatch.setattr(corpus.metadata, "distribution", lambda name: bare)
    assert refusal(corpus.find).startswith("jinja2: found no Python sources")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"vocab_size": 4096}, "Corpus.vocab_size: found 4096, "),
        ({"held_out_percent": 0.5}, "Corpus.held_out_percent: found 0.5, "),
    ],
)
def test_more_than_the_corpus_gives_is_refused(root, tmp_path, how, said):
    assert said in refusal(fetch, tmp_path / "out", **how)


def test_files_of_an_older_run_file_are_refused_with_what_to_write():
    document = read_toml(PROJECT / RUN_FILE)
    document["model"]["LLM"]["data_location"]["Corpus"] |= {"path": "my.jsonl", "text_key": "body"}
    with refused("Corpus.path", "my.jsonl", "data_location.Text"):
        runfile.parse(document, "a test")
    # an older release records both for the packages too
    location = {"path": None, "text_key": "text", "vocab_size": 300, "held_out_percent": 5.0}
    assert DataCorpus(shuffle=ShuffleDontShuffle(), **location).vocab_size == 300


def test_other_packages_take_the_place_of_the_default_ones(tmp_path):
    location = {"vocab_size": 300, "held_out_percent": 10.0, "packages": ("jinja2", "urllib3")}
    given = DataCorpus(shuffle=ShuffleDontShuffle(), **location)
    survey = corpus.survey(given, options(tmp_path / "store"))
    assert {file.name.partition("/")[0] for file in survey.files} == {"jinja2", "urllib3"}
    assert f"urllib3 {metadata.version('urllib3')}" in survey.read and "dvc" not in survey.read
    missing = given.model_copy(update={"packages": ("jinja2", "no-such-thing")})
    assert refusal(corpus.survey, missing, options(tmp_path / "store")).startswith(
        "no-such-thing: not inst"
    )


def test_the_packages_are_pinned_and_the_same_on_every_python():
    pinned = (PROJECT / "constraints.txt").read_text().lower().split()
    other = (PROJECT / "constraints-gpu.txt").read_text()
    for name in corpus.PACKAGES:
        assert f"{name}=={metadata.version(name)}" in pinned
        assert f"\n{name}==" not in other.lower()
        assert "Tag: py3-none-any\n" in metadata.distribution(name).read_text("WHEEL")
    names = [file.name for file in corpus.find()]
    assert names == sorted(set(names)) and {"rich/table.py", "dvc/output.py"} <= set(names)
    assert not [name for name in names if {"test", "tests"}.intersection(Path(name).parts)]


@pytest.mark.parametrize("file", [RUN_FILE, "params/small.toml"])
def test_ready_runs_pin_their_packages(file):
    run = runfile.load(PROJECT / file)
    found = corpus.find(run.llm.data_location.packages)
    contents = [(file.name, sha256_file(file.path)) for file in found]
    assert listing_sha256(contents) == run.pins.data, (
        "constraints.txt has changed: set the new pins in params/"
    )


def test_whole_packages_are_held_out_without_the_files_that_stand_in_train(root, tmp_path):
    (root / "low" / "copy.py").write_bytes((root / "high" / "i.py").read_bytes())
    fetched = fetch(tmp_path / "out", held_out_percent=60.0, most_seen_percent=5.0, vocab_size=270)
    files = [file.name for file in sources_in(root)]
    train = [name for name in files if name.startswith("high/")]
    held_out = [name for name in files if name.startswith("low/") and name != "low/copy.py"]
    assert fetched.source["held_out_files"] == held_out
    assert fetched.source["seen_in_train"] == ["low/copy.py"]
    for split, names in (("train", train), ("held_out", held_out)):
        assert texts(tmp_path / "out", split) == [(root / name).read_text() for name in names]


def test_the_halves_of_the_default_runs_held_out_split_are_of_different_packages(tmp_path):
    """And less than 1 % of it stands in the train split."""
    given = read_toml(PROJECT / RUN_FILE)["model"]["LLM"]["data_location"]["Corpus"]
    shards = fetch_into(folder := tmp_path / "out", DataCorpus(**given))
    assert seen.share(folder, shards) < 0.01
    packages = {name.split("/")[0] for name in shards.source["held_out_files"]}
    assert len(packages) == len(shards.split("held_out")) == 2
