import hashlib
import json
import os
import sysconfig
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pipeline import tokens
from pipeline.errors import LockstepError
from pipeline.locations import DataCorpus, ShuffleDontShuffle
from pipeline.progress import Progress
from pipeline.providers import corpus

PROGRESS = partial(Progress, "download")
LETTERS = "abcdefghijklmnop"


def location(vocab_size=300, held_out_percent=30.0) -> DataCorpus:
    return DataCorpus(
        vocab_size=vocab_size, held_out_percent=held_out_percent, shuffle=ShuffleDontShuffle()
    )


@pytest.fixture
def root(tmp_path) -> Path:
    """Sixteen small sources."""
    folder = tmp_path / "sources"
    for letter in LETTERS:
        path = folder / ("low" if letter < "h" else "high") / f"{letter}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"def {letter}{n}(value, other):\n    return value + {n}\n" for n in range(9)]
        path.write_text("".join(lines), encoding="utf-8")
    return folder


def fetch(root: Path, folder: Path, where: DataCorpus):
    folder.mkdir()
    return corpus.fetch_from(root, "a test", where, folder, PROGRESS)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read(folder: Path, split: str) -> np.ndarray:
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted((folder / split).iterdir())])


def refusal(call, *arguments) -> str:
    with pytest.raises(LockstepError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_fetches_give_identical_bytes(root, tmp_path):
    one = fetch(root, tmp_path / "one", location())
    other = fetch(root, tmp_path / "other", location())
    assert one == other
    assert content(tmp_path / "one") == content(tmp_path / "other")
    assert set(content(tmp_path / "one")) == {
        "train/00000.ds",
        "held_out/00000.ds",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/special_tokens_map.json",
    }


def test_decoded_shards_are_the_sources_each_ended_by_the_end_token(root, tmp_path):
    fetched = fetch(root, tmp_path / "out", location())
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    held_out = fetched.source["held_out_files"]
    train = sorted({path.relative_to(root).as_posix() for path in root.rglob("*.py")} - {*held_out})
    assert train and held_out
    for split, names in (("train", train), ("held_out", held_out)):
        text = tokenizer.decode(read(tmp_path / "out", split).tolist(), skip_special_tokens=False)
        assert text == "".join((root / name).read_text() + corpus.END for name in names)


def test_golden_ids_of_a_tiny_vocabulary(tmp_path):
    root = tmp_path / "sources"
    root.mkdir()
    (root / "a.py").write_text("low lower lowest low low\n")
    tokenizer = corpus.train_tokenizer(root, ["a.py"], 262, PROGRESS)
    end = tokenizer.token_to_id(corpus.END), tokenizer.token_to_id(corpus.PAD)
    assert end == (0, 1)
    assert [tokenizer.id_to_token(n) for n in range(258, 262)] == [
        "lo",
        "low",
        "\u0120low",
        "\u0120lowe",
    ]
    assert tokenizer.encode("low lower\n").ids == [259, 261, 83, 200]


def test_the_held_out_files_do_not_shape_the_tokenizer(root, tmp_path):
    fetched = fetch(root, tmp_path / "one", location())
    # Another text of the same length, so that the split stays.
    for name in fetched.source["held_out_files"]:
        path = root / name
        path.write_text("z" * path.stat().st_size)
    changed = fetch(root, tmp_path / "other", location())
    one, other = content(tmp_path / "one"), content(tmp_path / "other")
    assert [name for name in one if one[name] != other[name]] == ["held_out/00000.ds"]
    assert changed.source["sha256"] != fetched.source["sha256"]


def test_held_out_files_are_as_many_bytes_as_asked_and_stay_when_others_come(root):
    sizes = corpus.source_files(root)
    train, held_out = corpus.split_by_file(sizes, 30.0)
    assert sorted([*train, *held_out]) == list(sizes)
    assert 0.2 < sum(sizes[name] for name in held_out) / sum(sizes.values()) <= 0.3
    # 30 % of a larger corpus are at least the files that were 30 % of this one.
    more = {**sizes, **{f"more/{n}.py": sizes["low/a.py"] for n in range(16)}}
    assert len(corpus.split_by_file(more, 30.0)[1]) > len(held_out)
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert held_out == sorted(order[: len(held_out)])


def test_a_large_file_does_not_swell_the_held_out_part():
    sizes = {f"{n}.py": 100 for n in range(100)} | {"large.py": 100_000}
    for percent in (1.0, 5.0, 10.0, 50.0):
        held_out = corpus.split_by_file(sizes, percent)[1]
        assert sum(sizes[name] for name in held_out) <= sum(sizes.values()) * percent / 100


def test_tests_caches_packages_and_built_files_are_no_corpus(tmp_path):
    kept = ["a.py", "package/b.py", "testing.py", "configparser.py"]
    left = [
        "test/c.py",
        "tests/d.py",
        "package/test/e.py",
        "idlelib/idle_test/f.py",
        "lib2to3/tests/g.py",
        "site-packages/h.py",
        "dist-packages/i.py",
        "__pycache__/j.py",
        "_sysconfigdata__linux.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "sitecustomize.py",
        "k.txt",
    ]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    (tmp_path / "empty.py").touch()
    assert list(corpus.source_files(tmp_path)) == sorted(kept)


def test_a_source_that_is_no_utf8_or_spells_a_special_token_is_text(root, tmp_path):
    odd = b"# caf\xe9 " + corpus.END.encode() + b"\r\n" * 2
    (root / "z.py").write_bytes(odd + b"x = 1\r\n" * 300)
    fetched = fetch(root, tmp_path / "out", location(held_out_percent=10.0))
    assert "z.py" not in fetched.source["held_out_files"]
    ids = read(tmp_path / "out", "train")
    files = len(list(root.rglob("*.py"))) - len(fetched.source["held_out_files"])
    assert np.sum(ids == 0) == files
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    expected = f"# caf\N{REPLACEMENT CHARACTER} {corpus.END}\r\n\r\n" + "x = 1\r\n" * 300
    assert text.endswith(expected + corpus.END)


def test_shards_are_of_bounded_size_and_join_to_the_same_tokens(root, tmp_path, monkeypatch):
    fetch(root, tmp_path / "one", location())
    monkeypatch.setattr(corpus, "SHARD_TOKENS", 100)
    monkeypatch.setattr(corpus, "FILES_AT_ONCE", 3)
    fetch(root, tmp_path / "many", location())
    paths = sorted((tmp_path / "many" / "train").iterdir())
    sizes = [path.stat().st_size // 2 for path in paths]
    assert len(sizes) > 3
    assert sizes[:-1] == [100] * (len(sizes) - 1)
    assert 0 < sizes[-1] <= 100
    for split in ("train", "held_out"):
        np.testing.assert_array_equal(read(tmp_path / "one", split), read(tmp_path / "many", split))


def test_transformers_loads_the_tokenizer_with_its_special_tokens(root, tmp_path):
    fetch(root, tmp_path / "out", location())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert len(tokenizer) == 300
    assert (tokenizer.bos_token, tokenizer.eos_token) == (corpus.END, corpus.END)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    text = "def  café(value):\n\treturn  value\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    said = json.loads((tmp_path / "out" / "tokenizer" / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast"  # which version 4 knows too


def test_the_source_is_recorded_with_its_hash(root, tmp_path):
    source = fetch(root, tmp_path / "out", location()).source
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(root).as_posix()}\n"
        for path in root.rglob("*.py")
    ]
    assert source["sha256"] == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    assert source["files"] == len(LETTERS)
    assert source["bytes"] == sum(path.stat().st_size for path in root.rglob("*.py"))


def test_a_folder_without_sources_is_refused_with_its_name(tmp_path):
    message = refusal(fetch, tmp_path, tmp_path / "out", location())
    assert f"{tmp_path}: found no Python sources" in message
    assert "no Python sources" in refusal(fetch, tmp_path / "no", tmp_path / "out2", location())


def test_a_vocabulary_larger_than_the_corpus_gives_is_refused(root, tmp_path):
    message = refusal(fetch, root, tmp_path / "out", location(vocab_size=4096))
    assert "Corpus.vocab_size: found 4096, expected at most " in message


def test_a_held_out_part_that_no_file_fits_is_refused(root, tmp_path):
    message = refusal(fetch, root, tmp_path / "out", location(held_out_percent=0.5))
    assert (
        "Corpus.held_out_percent: found 0.5, expected enough to hold out one of the 16" in message
    )
    assert str(root) in message


def test_the_default_root_is_the_standard_library_of_this_python(tmp_path, monkeypatch):
    stdlib = Path(os.__file__).parent
    assert Path(sysconfig.get_path("stdlib")) == stdlib
    names = corpus.source_files(stdlib)
    assert {"os.py", "json/decoder.py"} <= names.keys()
    assert not [name for name in names if "test" in Path(name).parts[:-1]]
    # A few of its files, tokenized as the whole would be.
    small = {name: names[name] for name in names if name.startswith(("json/", "logging/"))}
    monkeypatch.setattr(corpus, "source_files", lambda root: small)
    fetched = corpus.fetch(location(512, 20.0), tmp_path, PROGRESS)
    assert fetched.source["read"].startswith("the standard library of CPython 3.")
    tokens.write_shards(
        tmp_path, fetched.token_size_in_bytes, fetched.vocab_size, fetched.shuffle, fetched.source
    )
    tokens.check_ids(tmp_path, 512)
