"""What a file says of itself is asked before its bytes are read: a row of a table, a test."""

import codecs
import gzip
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from safetensors.numpy import save

from pipeline import runfile
from pipeline.runfile.data import DataLocal
from pipeline.tokens import signs
from tests.pipeline.net import token_servers
from tests.pipeline.net.token_servers import HOW
from tests.pipeline.sources import corpora
from tests.pipeline.sources.options import fetch_into, refusal
from tests.servers.files import Files

TOKENS = np.random.default_rng(0).integers(10, 50_000, 2000)


def fetch(root: Path, size="TwoBytes", out="out"):
    return fetch_into(root.parent / out, DataLocal(path=str(root), token_size_in_bytes=size))


@pytest.fixture
def root(tmp_path) -> Path:
    (root := tmp_path / "tokens").mkdir()
    return root


def put(path: Path, tokens=TOKENS, size=2) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    tokens.astype(f"<u{size}").tofile(path)
    return path


# ---- First bytes ----


def zipped() -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("archive/data.pkl", "x" * 600)
    return file.getvalue()


def parquet_file() -> bytes:
    parquet.write_table(pyarrow.table({"text": ["a"] * 300}), file := io.BytesIO())
    return file.getvalue()


def header(date: int, size: int) -> bytes:
    return np.array([date, 1, len(TOKENS)] + [0] * 253, "<i4").tobytes() + b"\1" * size * 20


NPY = io.BytesIO()
np.save(NPY, TOKENS)
BEGINNINGS = {
    "a NumPy header": [NPY.getvalue()],
    "a zip archive, as of torch or NumPy": [zipped()],
    "a pickle of torch": [signs.OLD_TORCH + b"\x80\x02}q\x00." * 100],
    "gzip data": [gzip.compress(TOKENS.tobytes())],
    "zstd data": [pyarrow.compress(TOKENS.tobytes(), "zstd", asbytes=True)],
    "a parquet file": [parquet_file()],
    "a safetensors file": [save({"a": TOKENS})],
    "an index of Megatron": [signs.MEGATRON_INDEX + bytes(500)],
    "a header of 256 int32, as of llm.c": [header(20240520, 2), header(20240801, 4)],
}
STORY = "A story, of 中文.\n" * 40
MARKED = {
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
}


def test_each_row_of_the_tables_has_its_test():
    assert BEGINNINGS.keys() == signs.FORMATS.keys()
    assert MARKED.keys() == signs.MARKS.keys()


@pytest.mark.parametrize("what", BEGINNINGS)
def test_a_file_of_tokens_that_begins_like_another_format_is_refused_as_that(what, root):
    for number, content in enumerate(BEGINNINGS[what]):
        (path := root / "0.bin").write_bytes(content + bytes(len(content) % 2))
        said = refusal(fetch, root, out=f"out{number}")
        assert said.startswith(f"{path}: found {what}, expected tokens alone")
        named = corpora.put(root.parent / f"text{number}", {"a.txt": content})
        said = refusal(corpora.fetch, named / "a.txt", root.parent / f"o{number}")
        assert said == f"{named / 'a.txt'}: found {what}, expected text in UTF-8"


@pytest.mark.parametrize("mark", MARKED, ids=MARKED.get)
def test_text_of_another_encoding_is_refused_as_that_wherever_text_is_read(mark, root, tmp_path):
    encoding = MARKED[mark]
    name = encoding[:6].upper()
    lines = "".join(json.dumps({"text": "中文 " * n}, ensure_ascii=False) + "\n" for n in range(99))
    files = {
        "a.txt": mark + STORY.encode(encoding),
        "a.jsonl": mark + lines.encode(encoding),
        "a.jsonl.gz": gzip.compress(mark + lines.encode(encoding)),
        "a.jsonl.zst": pyarrow.compress(mark + lines.encode(encoding), "zstd", asbytes=True),
    }
    for number, (file, content) in enumerate(files.items()):
        path = corpora.put(tmp_path / "text", {file: content}) / file
        expected = f"{path}: begins with the mark of {name}, expected UTF-8"
        assert refusal(corpora.fetch, path, tmp_path / f"t{number}").startswith(expected)
    (root / "0.ds").write_bytes(files["a.txt"])
    assert ": found text, 'A story, of" in refusal(fetch, root)


def test_no_tokens_look_like_another_format(root):
    """Tokens that begin as gzip data and as a mark do, but do not go on so."""
    for number, first in enumerate(([0x8B1F, 0x0008], [0xFEFF, 20], [0xFFFE, 20])):
        put(root / f"{number}.ds", np.array([*first, *TOKENS]))
    assert len(fetch(root).files) == 3


# ---- Sizes of tokens ----


def test_tokens_of_four_bytes_are_not_read_as_twice_as_many_of_two(root):
    path = put(root / "0.bin", np.concatenate([TOKENS, TOKENS + 80_000]), size=4)
    said = refusal(fetch, root)
    assert said.startswith(f"{path}: every other token is below 4") and "FourBytes" in said
    assert fetch(root, "FourBytes", "again").files[0].tokens == 2 * len(TOKENS)


def test_tokens_of_two_bytes_may_be_small_or_few(root):
    put(root / "small.ds", TOKENS % 3)
    put(root / "few.ds", np.array([9, 0] * 20))
    put(root / "padded.ds", np.concatenate([TOKENS, TOKENS * 0]))
    assert len(fetch(root).files) == 3


def of_megatron(code: int) -> bytes:
    return signs.MEGATRON_INDEX + (1).to_bytes(8, "little") + bytes([code]) + bytes(64)


SAYING = {
    ".idx": [(of_megatron(4), 4), (of_megatron(8), 2), (of_megatron(5), 8), (b"no index", None)],
    ".metadata": [(b"gpt2|4\n2000\n2.0K", 4), (b"gpt2|2\n4000", 2), (b"gpt2\n", None)],
    ".index": [
        (np.array([10, 2000], "<u8").tobytes(), 4),
        (np.array([10, 4000], "<u8").tobytes(), 2),
        (np.array([10, 4001], "<u8").tobytes(), None),
        (b"", None),
    ],
}


def test_each_file_beside_has_its_test():
    assert SAYING.keys() == signs.BESIDE.keys()


@pytest.mark.parametrize("ending", SAYING)
def test_what_lies_beside_a_token_file_says_the_size_of_its_tokens(ending, root):
    put(root / "held_out" / "a.bin", TOKENS + 10)
    for number, (content, size) in enumerate(SAYING[ending]):
        path = put(root / "a.bin", np.arange(2000), size=4)
        (beside := root / ("a.idx" if ending == ".idx" else f"a.bin{ending}")).write_bytes(content)
        if size in (None, 2):
            path.write_bytes(np.arange(4000, dtype="<u2").tobytes())
            assert fetch(root, out=f"out{number}").files[0].tokens == 4000
            continue
        said = refusal(fetch, root, out=f"out{number}")
        assert said.startswith(f"{path}: {beside} beside it says {size} bytes a token")
        assert said.endswith("FourBytes" if size == 4 else "tokens of 2 or 4 bytes")


def test_a_mask_beside_a_token_file_is_not_left_out_silently(root):
    put(root / "a.ds")
    (root / "a.ds.loss").write_bytes(bytes(len(TOKENS)))
    said = fetch(root).warnings
    assert any(line.startswith(f"{root / 'a.ds.loss'} says which tokens a loss c") for line in said)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_server_has_is_asked_too_and_before_it_is_streamed(stream, tmp_path):
    for number, (content, what) in enumerate(
        [
            (header(20240520, 2), "found a header of 256 int32"),
            (TOKENS.astype("<u4").tobytes(), "every other token is below 4"),
        ]
    ):
        files = Files({"0.ds": content})
        with files.serving():
            where = {**HOW, "location": {"SingleUrl": files.url("0.ds")}}
            document = token_servers.document({"Http": where})
            location = runfile.parse(document, "a test").llm.data_location
            said = refusal(fetch_into, tmp_path / f"out{number}", location, stream=stream)
            assert f"/0.ds: {what}" in said


# ---- Names ----


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.bin", "train"),
        ("fineweb_val_000000.bin", "val"),
        ("train-00000-of-00009.parquet", "train"),
        ("wiki.valid.tokens", "valid"),
        ("validation/0.ds", "validation"),
        ("en/Test/0.ds", "test"),
        ("held_out/train.ds", "held_out"),
        ("a_held_out_1.ds", "held_out"),
        ("dev-0.ds", "dev"),
        ("eval.bin", "eval"),
        ("latest.ds", None),
        ("trained-evaluation.ds", None),
        ("contest/000.ds", None),
    ],
)
def test_a_name_says_its_split_by_a_word(name, split):
    assert signs.split_of(name) == split


@pytest.mark.parametrize(
    ("names", "train", "held_out", "unused"),
    [
        (["eval.bin", "train.bin"], ["train.bin"], ["eval.bin"], 0),
        (["a.ds", "b.ds", "test.bin"], ["a.ds", "b.ds"], ["test.bin"], 0),
        (["train.bin", "val.bin", "test.bin"], ["train.bin"], ["val.bin"], 1),
        (["train/0.ds", "val/0.ds"], ["train/0.ds"], ["val/0.ds"], 0),
        (["more.ds", "train.ds", "held_out/0.ds"], ["more.ds", "train.ds"], ["held_out/0.ds"], 0),
    ],
)
def test_no_file_that_is_named_for_evaluation_is_trained_on(root, names, train, held_out, unused):
    for number, name in enumerate(names):
        put(root / name, TOKENS + number)
    fetched = fetch(root)
    assert fetched.source["files"] == {"train": train, "held_out": held_out}
    assert len(fetched.warnings) == unused


def test_a_folder_of_nothing_but_what_is_held_out_or_of_other_folders_is_one_line(root):
    for name in ("test.ds", "val.ds"):
        put(root / name)
    assert f"{root}: found only held-out files, test.ds among them" in refusal(fetch, root)
    (root / "test.ds").unlink()
    (warning,) = fetch(root, out="alone").warnings  # whoever gives one file knows its name
    assert "nothing is held out" in warning
    (root / "val.ds").unlink()
    put(root / "deeper/and/0.ds")
    said = refusal(fetch, root, out="again")
    assert f"{root} has no .ds, .bin, .npy files but deeper/and/0.ds" in said and "train/" in said
