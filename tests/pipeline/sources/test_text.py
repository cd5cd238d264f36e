"""Documents anywhere, as tokens: each once, on the side that its hash says, whatever it lies in."""

import gzip
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from pipeline import sources
from pipeline.runfile.data import Limit, ShuffleSeeded
from pipeline.sources.text import documents, tokenizing
from pipeline.sources.text.text import is_held_out
from tests import tiny
from tests.pipeline.sources.corpora import (
    PERCENT,
    every_text,
    fetch,
    lines_of,
    location,
    on_hub,
    parquet_of,
    put,
    read,
    stories,
    texts,
    write_tokenizer,
)
from tests.pipeline.sources.options import options, refusal
from tests.servers import s3 as s3_server
from tests.servers.bucket import running_bucket
from tests.servers.files import Files

STORIES = stories(120)


def files_of(texts: list[str]) -> dict[str, bytes]:
    """The same documents in a file of each kind, in the order of their names."""
    parts = [texts[n::6] for n in range(5)]
    return {
        "a.jsonl": lines_of(parts[0]),
        "b.jsonl.gz": gzip.compress(lines_of(parts[1])),
        "c.json.zst": pa.compress(lines_of(parts[2]), "zstd", asbytes=True),
        "d/e.parquet": parquet_of(parts[3]),
        "d/f.parquet": parquet_of(parts[4], compression="zstd"),
        **{f"g/{n}.txt": text.encode() for n, text in enumerate(texts[5::6])},
    }


def sides(folder: Path) -> tuple[list[str], list[str]]:
    return texts(folder, "train"), texts(folder, "held_out")


# ---- What comes out ----


def test_every_document_of_every_kind_of_file_is_there_once_where_its_hash_says(tmp_path):
    root = put(tmp_path / "text", files_of(STORIES))
    fetched = fetch(root, tmp_path / "out")
    train, held_out = sides(tmp_path / "out")
    assert sorted(train + held_out) == sorted(STORIES)
    assert all(is_held_out(text, PERCENT) for text in held_out)
    assert not any(is_held_out(text, PERCENT) for text in train)
    assert fetched.source["documents"] == {"train": len(train), "held_out": len(held_out)}
    assert 0.15 < len(held_out) / len(STORIES) < 0.45
    assert fetched.source["left_out"] == {} and fetched.warnings == ()


def test_tokens_are_those_of_each_document_alone_and_an_end(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    long = "word " * 50_000  # in several pieces
    root = put(tmp_path / "text", {"a.jsonl": lines_of([*STORIES, long])})
    fetch(root, tmp_path / "out", tokenizer=str(tokenizer))
    alone = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    alone.no_truncation()
    alone.no_padding()
    for split, side in (("train", False), ("held_out", True)):
        expected: list[int] = []
        for text in [*STORIES, long]:
            if is_held_out(text, PERCENT) == side:
                expected += [*alone.encode(text, add_special_tokens=False).ids, 301]
        assert read(tmp_path / "out", split).tolist() == expected


def test_tokens_are_the_same_from_a_hub_a_bucket_a_web_server_and_this_disk(
    tmp_path, monkeypatch, caplog
):
    contents = {"data/a.parquet": parquet_of(STORIES)}
    fetch(put(tmp_path / "disk", contents), tmp_path / "disk_out")
    expected = tiny.contents(tmp_path / "disk_out")
    with on_hub(monkeypatch, tmp_path, "ours/web", contents | {"README.md": b"text"}) as hub:
        commit = hub.datasets["ours/web"].refs["main"]
        fetched = fetch("ours/web", tmp_path / "hub" / "out")
        assert fetched.source["commit"] == commit and not fetched.unproven
        assert f"is commit {commit} today; set revision to that" in caplog.text
        assert tiny.contents(tmp_path / "hub" / "out") == expected
        pinned = fetch("ours/web", tmp_path / "hub" / "pinned", revision=commit)
        assert pinned.source["sha256"] == fetched.source["sha256"]
        said = refusal(fetch, "ours/none", tmp_path / "hub" / "none")
        assert "ours/none" in said
    with s3_server.running_s3(monkeypatch) as bucket:
        bucket.objects |= {f"web/{name}": data for name, data in contents.items()}
        fetched = fetch(f"s3://{bucket.name}/web", tmp_path / "s3" / "out")
        assert tiny.contents(tmp_path / "s3" / "out") == expected and len(fetched.unproven) == 1
    with running_bucket(monkeypatch) as bucket:
        bucket.put("web/data/a.parquet", contents["data/a.parquet"])
        fetched = fetch(f"gs://{bucket.name}/web", tmp_path / "gs" / "out")
        assert tiny.contents(tmp_path / "gs" / "out") == expected and not fetched.unproven
    served = Files({"a.parquet": contents["data/a.parquet"]})
    with served.serving():
        fetch(served.url("a.parquet"), tmp_path / "web" / "out")
        assert tiny.contents(tmp_path / "web" / "out") == expected
        sent = sum(served.sent.values())
        fetch(served.url("a.parquet"), tmp_path / "web" / "again")
        assert sum(served.sent.values()) == sent  # it is in the store


# ---- How much of it ----


def test_a_limit_of_tokens_fetches_no_file_that_it_does_not_need(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "CHARACTERS_AT_ONCE", 200)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    contents = {f"{n}.jsonl": lines_of(STORIES[30 * n : 30 * n + 30]) for n in range(4)}
    with on_hub(monkeypatch, tmp_path, "ours/web", contents):
        given = {"tokenizer": str(tokenizer)}
        fetched = fetch("ours/web", tmp_path / "out", Limit(tokens=100), **given)
    assert fetched.source["files"] == ["0.jsonl"]
    assert sum(file.tokens for file in fetched.files if file.split == "train") == 100
    aside = [text for text in STORIES[:30] if is_held_out(text, PERCENT)]
    assert texts(tmp_path / "out", "held_out", end="</s>") == aside  # all of that file
    fetched = fetch(put(tmp_path / "disk", contents), tmp_path / "two", Limit(files=2), **given)
    assert fetched.source["files"] == ["0.jsonl", "1.jsonl"]
    assert sum(fetched.source["documents"].values()) == 60


def test_a_limit_fetches_no_row_group_of_parquet_that_it_does_not_need(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "CHARACTERS_AT_ONCE", 2000)
    monkeypatch.setattr(documents, "FIRST_BYTES", 4000)
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    many = [f"{n} {np.random.default_rng(n).bytes(60).hex()}" for n in range(2000)]
    contents = {"a.parquet": parquet_of(many), "b.parquet": parquet_of(many)}
    how = {"tokenizer": str(tokenizer)}
    whole = fetch(put(tmp_path / "disk", contents), tmp_path / "all", Limit(tokens=9000), **how)
    with on_hub(monkeypatch, tmp_path, "ours/web", contents) as hub:
        fetched = fetch("ours/web", tmp_path / "some", Limit(tokens=9000), **how)
        sent = sum(hub.sent.values())
        again = fetch("ours/web", tmp_path / "again", Limit(tokens=9000), **how)
        more = sum(hub.sent.values()) - sent
    assert sent < len(contents["a.parquet"]) / 2
    assert more < 70_000  # the end of the file, and nothing that is in the store
    assert fetched.source["files"] == ["a.parquet"] and fetched.unproven
    assert again.source["sha256"] == fetched.source["sha256"]
    train = [file.sha256 for file in fetched.files if file.split == "train"]
    assert train == [file.sha256 for file in whole.files if file.split == "train"]
    held_out, of_all = (texts(tmp_path / name, "held_out", end="</s>") for name in ("some", "all"))
    assert held_out and held_out == of_all[: len(held_out)]


@pytest.mark.parametrize(
    "data",
    [
        b"no parquet at all",
        b"PAR1" + bytes(20) + (2**31).to_bytes(4, "little") + b"PAR1",
        b"PAR1" + bytes(20) + (12).to_bytes(4, "little") + b"PAR1",
    ],
)
def test_a_far_file_that_is_no_parquet_is_one_line(data, tmp_path, monkeypatch):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with on_hub(monkeypatch, tmp_path, "ours/web", {"a.parquet": data}):
        how = {"tokenizer": str(tokenizer)}
        line = refusal(fetch, "ours/web", tmp_path / "out", Limit(tokens=100), **how)
    assert "expected a parquet file" in line and "a.parquet" in line


README = """---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample
  data_files:
  - split: train
    path: sample/*
  - split: test
    path: [held/a.jsonl, held/b.jsonl]
- config_name: plain
  data_files: "sample/*"
---
# A dataset
"""


@pytest.mark.parametrize(
    ("readme", "given", "expected"),
    [
        (README, {"subset": "sample"}, ["sample/1.jsonl"]),
        (README, {"subset": "plain"}, ["sample/1.jsonl"]),
        (README, {"subset": "sample", "split": "test"}, ["held/a.jsonl"]),
        (README, {}, ["data/x/0.jsonl", "held/a.jsonl", "sample/1.jsonl"]),
        (
            README,
            {"subset": "others"},
            "found the subsets default, sample, plain, expected 'others",
        ),
        (README, {"subset": "plain", "split": "test"}, "found the splits train in subset 'plain'"),
        ("# No front", {"subset": "sample"}, "found the subsets none"),
        ("---\na: [\n---\n", {"subset": "sample"}, "README.md: while parsing a flow node"),
        ("---\nconfigs: 3\n---\n", {"subset": "sample"}, "README.md: configs is 3"),
        (None, {"subset": "sample"}, "README.md: missing, or larger than"),
    ],
)
def test_a_subset_of_a_dataset_is_what_its_readme_says(
    readme, given, expected, tmp_path, monkeypatch
):
    files = {f"{name}.jsonl": lines_of(STORIES) for name in ("data/x/0", "sample/1", "held/a")}
    files |= {"README.md": readme.encode()} if readme else {}
    with on_hub(monkeypatch, tmp_path, "ours/web", files):
        how = options(tmp_path / "store")
        if isinstance(expected, str):
            assert expected in refusal(sources.survey, location("ours/web", **given), how)
        else:
            found = sources.survey(location("ours/web", **given), how)
            assert [file.name for file in found.files] == expected


@pytest.mark.parametrize(
    ("says", "expected"),  # as load_dataset_builder of `datasets` 5.2 lists them
    [
        ("data_files: data/*.jsonl", ["data/a", "data/b"]),
        ("data_files: ./data/*.jsonl", ["data/a", "data/b"]),
        ("data_files: data/**/*.jsonl", ["data/a", "data/b", "data/deep/er/d", "data/rejected/c"]),
        ('data_files: "*.jsonl"', ["x"]),
        ('data_dir: en\n  data_files: "*.jsonl"', ["en/e"]),
        ('data_files: "**/[ex].jsonl"', ["en/e", "x"]),
    ],
)
def test_patterns_of_a_readme_end_at_a_slash_as_on_the_hub(says, expected, tmp_path, monkeypatch):
    names = ("data/a", "data/b", "data/rejected/c", "data/deep/er/d", "en/e", "x")
    files = {f"{name}.jsonl": lines_of(STORIES) for name in names}
    files["README.md"] = f"---\nconfigs:\n- config_name: s\n  {says}\n---\n".encode()
    with on_hub(monkeypatch, tmp_path, "ours/web", files):
        found = sources.survey(location("ours/web", subset="s"), options(tmp_path / "store"))
    assert [file.name.removesuffix(".jsonl") for file in found.files] == expected


def test_all_files_of_a_dataset_with_subsets_are_read_with_a_warning(tmp_path, monkeypatch, caplog):
    files = {f"{name}.jsonl": lines_of(STORIES) for name in ("data/x/0", "sample/1")}
    with on_hub(monkeypatch, tmp_path, "ours/web", files | {"README.md": README.encode()}) as hub:
        sources.survey(location("ours/web"), options(tmp_path / "store"))
        said = "all files are read, of the subsets default, sample, plain; set subset to read one"
        assert said in caplog.text
        caplog.clear()
        sources.survey(location("ours/web", files=["data/*"]), options(tmp_path / "other"))
        hub.datasets["ours/web"].commit(files | {"README.md": b"---\na: [\n---\n"})
        sources.survey(location("ours/web"), options(tmp_path / "third"))
        assert "subsets" not in caplog.text


def test_patterns_choose_the_files_and_the_survey_lists_them(tmp_path):
    files = files_of(STORIES) | {"a.md": b"no", ".b.txt": b"hidden", "d/x.bin": b"no"}
    root = put(tmp_path / "text", files)
    found = sources.survey(location(root, files=["d/*"]), options(tmp_path / "store"))
    assert [file.name for file in found.files] == ["d/e.parquet", "d/f.parquet"]
    assert {file.tokens for file in found.files} == {None}
    said = refusal(fetch, root, tmp_path / "out", files=["*.xyz"])
    assert "found no file that matches *.xyz and ends in .parquet, " in said


def test_the_survey_reads_of_parquet_how_much_text_there_is(tmp_path, monkeypatch):
    many = [f"{n} {np.random.default_rng(n).bytes(60).hex()}" for n in range(2000)]
    contents = {f"{name}.parquet": parquet_of(many, compression="zstd") for name in "ab"}
    contents["c.txt"] = b"plain " * 1000
    trained = (2 * len("".join(many)) + 6000) * (1 - PERCENT / 100)
    store = options(tmp_path / "store")
    here = sources.survey(location(put(tmp_path / "disk", contents)), store)
    with on_hub(monkeypatch, tmp_path, "ours/web", contents):
        far = sources.survey(location("ours/web"), store)
    # too much by the headers of pages, which are many with 16 texts in a row group
    assert here.text_bytes == far.text_bytes == pytest.approx(trained, rel=0.2)
    packed = put(tmp_path / "packed", contents | {"d.jsonl.gz": gzip.compress(lines_of(many))})
    assert sources.survey(location(packed), store).text_bytes is None
    other = put(tmp_path / "other", {"a.parquet": parquet_of(many, column="body")})
    assert "expected 'text' with text among them" in refusal(sources.survey, location(other), store)


# ---- What is no document ----


def test_what_is_no_document_is_left_out_counted_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "DOCUMENT_BYTES", 3000)
    broken = pa.array([b"\xff\xfe", *(t.encode() for t in STORIES)], pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), len(broken), broken.buffers())})
    parquet.write_table(table, tmp_path / "broken.parquet")
    wrong = [
        b"{",
        b"[1]",
        b'{"text": "\\ud800"}',
        b'{"other": 1}',
        b'{"text": 3}',
        b'{"text": "\xff"}',
    ]
    root = put(
        tmp_path / "text",
        {
            "a.parquet": parquet_of([None, "", "x" * 4000, *STORIES]),
            "b.parquet": (tmp_path / "broken.parquet").read_bytes(),
            "c.jsonl": b"\n".join([*wrong, b'{"text": "' + b"y" * 9000 + b'"}', lines_of(STORIES)]),
            "d.txt": b"z" * 3001,
            "e.txt": b"\xef\xbb\xbfThe end",
        },
    )
    fetched = fetch(root, tmp_path / "out")
    assert every_text(tmp_path / "out") == sorted([*STORIES * 3, "The end"])
    assert fetched.source["left_out"] == {
        documents.EMPTY: 3,
        documents.TOO_LONG: 3,
        documents.NOT_UTF8: 3,
        documents.NOT_JSON: 2,
        documents.NO_KEY: 1,
    }
    (warning,) = fetched.warnings
    assert warning.startswith(f"{root}: left out 3 not UTF-8, 2 not a JSON object, ")


def shard_of(texts: list, kind: pa.DataType) -> bytes:
    values = pa.array(texts, pa.string())
    if pa.types.is_dictionary(kind):
        column = values.dictionary_encode()
    else:
        column = pa.nulls(len(texts)) if pa.types.is_null(kind) else values.cast(kind)
    parquet.write_table(pa.table({"text": column}), file := pa.BufferOutputStream())
    return file.getvalue().to_pybytes()


def test_text_is_read_of_whatever_type_its_column_is(tmp_path):
    kinds = [pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.binary()]
    kinds += [pa.large_binary(), pa.large_string(), pa.binary_view()]
    files = {
        f"{number}.parquet": shard_of([*STORIES[number::6], None], kind)
        for number, kind in enumerate(kinds)
    }
    files["nulls.parquet"] = shard_of([None] * 5, pa.null())
    fetched = fetch(put(tmp_path / "text", files), tmp_path / "out")
    assert every_text(tmp_path / "out") == sorted(STORIES)
    assert fetched.source["left_out"] == {documents.EMPTY: len(kinds) + 5}


def test_a_large_text_that_stands_in_many_rows_is_in_memory_once(tmp_path):
    """Sixty-four rows of four MB, which a dictionary has once: four MB in the file."""
    large = "".join(map(chr, np.random.default_rng(0).integers(33, 127, 2**22).tolist()))
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), [large])
    column = pa.chunked_array([column]).cast(pa.string())
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**23
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool := pa.system_memory_pool())
    try:
        read = documents.documents(tmp_path / "a.parquet", "a.parquet", "text", Counter())
        assert sum(text == large for text in read) == 64
    finally:
        pa.set_memory_pool(before)
    assert pool.max_memory() < 2**26


def test_json_lines_named_json_are_read_where_no_other_text_is(tmp_path):
    root = put(tmp_path / "text", {"a.json": lines_of(STORIES)})
    fetch(root, tmp_path / "out")
    assert every_text(tmp_path / "out") == sorted(STORIES)
    put(root, {"a.json": b'{"a": "description"}', "b.jsonl": lines_of(STORIES)})
    assert fetch(root, tmp_path / "two").source["files"] == ["b.jsonl"]


def test_a_file_that_is_named_for_evaluation_beside_one_to_train_on_is_held_out_whole(tmp_path):
    files = {"test-0.jsonl": lines_of(STORIES[:40]), "train-0.jsonl": lines_of(STORIES[40:])}
    root = put(tmp_path / "text", files | {"attest-0.jsonl": lines_of(["more and more"])})
    fetched = fetch(root, tmp_path / "out")
    train, held_out = sides(tmp_path / "out")
    assert set(STORIES[:40]) <= set(held_out) and not set(STORIES[:40]) & set(train)
    assert fetched.source["held_out_files"] == ["test-0.jsonl"]


# A frame of zstd with a window of 2**31 bytes, as `--long=31` makes it, and one block of bytes.
LONG = b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + (3 << 3 | 1).to_bytes(3, "little") + b"{}\n"


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.parquet", parquet_of(["x"], column="body"), "found the columns id (int64), body (stri"),
        ("a.parquet", parquet_of([1, 2]), "expected 'text' with text among them"),
        ("a.parquet", b"no parquet", "expected a parquet file"),
        ("a.parquet", parquet_of(STORIES)[:-9], "expected a parquet file"),
        ("a.jsonl", b'{"body": "x", "id": 1}\n', "found the keys body, id, expected 'text' among"),
        ("a.jsonl.gz", gzip.compress(lines_of(STORIES))[:-20], "expected whole gzip data"),
        ("a.jsonl.gz", b"no gzip", "expected whole gzip data"),
        ("a.jsonl.zst", b"no zstd", "expected whole zstd data"),
        ("a.jsonl", json.dumps([{"text": "a"}] * 9).encode(), "found a JSON array, expected JSON"),
        ("a.json", json.dumps([{"text": "a"}] * 9, indent=1).encode(), "jq -c '.[]' FILE > FILE"),
        ("a.json", json.dumps({"text": "a"}, indent=1).encode(), "found JSON over several lines"),
        ("a.jsonl.zst", LONG, "zstd -d --long=31 FILE unpacks it"),
        ("a.jsonl", b"\xff\n[1]\n1\n\n" * 9, "left out 9 not UTF-8, 18 not a JSON object"),
        ("a.jsonl", b'{"text": ""}\n' * 9, "left out 9 without text"),
        ("a.txt", b"\xe4", "left out 1 not UTF-8"),
        ("a.jsonl", lines_of([STORIES[0]] * 99), "none of them in the held_out split"),
    ],
)
@pytest.mark.parametrize("trained", [False, True])
def test_text_of_another_form_is_one_line_that_says_what_it_is(name, data, said, trained, tmp_path):
    """Also where the error is of a tokenizer, or of a split, that finds nothing."""
    given = {} if trained else {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer"))}
    root = put(tmp_path / "text", {name: data})
    line = refusal(fetch, root, tmp_path / "out", **given)
    assert said in line and str(root) in line


def test_offline_what_was_listed_is_cut_and_tokenized_in_another_way(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with Files().serving() as served:
        served.put("a.jsonl", lines_of(STORIES))
        address = served.url("a.jsonl")
        fetch(address, tmp_path / "out")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seeded = ShuffleSeeded(seed=(7,) * 32)
    fetched = fetch(
        address, tmp_path / "other", held_out_percent=60.0, vocab_size=280, shuffle=seeded
    )
    assert fetched.shuffle == seeded and fetched.vocab_size == 280
    assert every_text(tmp_path / "other") == sorted(STORIES)
    line = refusal(fetch, address, tmp_path / "none", files=["b*"])
    assert "HF_HUB_OFFLINE is set, expected a stored listing" in line


def test_what_is_nowhere_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = refusal(fetch, "no such folder", tmp_path / "a")
    assert "expected a file or folder, an address, or owner/name of a dataset" in line
    root = put(tmp_path / "text", {"a.txt": b"x"})
    line = refusal(fetch, root, tmp_path / "b", revision="main")
    assert "revision is 'main', expected none" in line
    line = refusal(fetch, root, tmp_path / "c", subset="x")
    assert "subset is 'x', expected none" in line


def test_text_of_another_ending_is_read_where_it_is_named(tmp_path):
    names = ["a.md", "b/c.MD", "d.py"]
    root = put(tmp_path / "text", {name: f"{name} x".encode() for name in [*names, "e.png"]})
    store = options(tmp_path / "store")
    found = sources.survey(location(root, files=["*.md", "*.MD"]), store)
    assert [file.name for file in found.files] == names[:2]
    assert [f.name for f in sources.survey(location(root / "d.py"), store).files] == ["d.py"]
    assert "found no file that matches *" in refusal(sources.survey, location(root), store)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, lines):
    write = tokenizing.cut

    def append_and(text):
        with open(lines, "a") as file:
            file.write('{"text": "more"}\n')
        return write(text)

    monkeypatch.setattr(tokenizing, "cut", append_and)
    assert refusal(fetch, lines, tmp_path / "out").startswith(f"{lines}: changed while it was read")
