"""Python's own sources as tokens: the packages, their tokenizer, and what is held out."""

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
from pipeline.runfile.data import DataCorpus
from pipeline.sources.text import package_sources, splitting, tokenizing
from pipeline.sources.text.text_file import TextFile
from pipeline.sources.text.tokenizing import END
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.given_files import stamp
from pipeline.stage.keys import PROJECT, RUN_FILE
from tests.pipeline.sources.corpora import content, location, put, read, texts
from tests.pipeline.sources.options import options, refusal

LETTERS = "abcdefghijklmnop"


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
