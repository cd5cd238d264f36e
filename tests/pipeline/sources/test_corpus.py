"""Text into tokens: the sources of packages and a user's files, whole, held out and limited."""

import gzip
import hashlib
import json
import socket
import tracemalloc
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pipeline import runfile, sources
from pipeline.runfile.data import DataCorpus, Limit
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
from tests.pipeline.sources.corpora import (
    content,
    every_text,
    fetch,
    location,
    put,
    read,
    stories,
    texts,
    write_lines,
    write_tokenizer,
)
from tests.pipeline.sources.options import options, refusal

pytestmark = pytest.mark.usefixtures("here")
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
