"""Arrays of files and of a workload: what comes out is what went in, bit for bit."""

import io
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from parts.workload.rows import writing
from parts.workload.tables import DataArrays, DataWorkload
from pipeline import sources
from pipeline.runfile.data import Limit, ShuffleDontShuffle
from pipeline.tokens.rows import Dtype
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards, write_shards
from tests.errors import check_names
from tests.pipeline.sources.options import fetch_into, options, refusal
from tests.pipeline.tokens.shards_folder import decoded

IN_ORDER = ShuffleDontShuffle()
RNG = np.random.default_rng(0)
DTYPES = Dtype.__args__


def values(dtype: str, *shape: int) -> np.ndarray:
    """Values of any bits that are finite."""
    if dtype == "bool":
        return RNG.integers(0, 2, shape).astype(bool)
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    found = np.frombuffer(RNG.bytes(size), dtype).reshape(shape).copy()
    if found.dtype.kind not in "iu":
        with np.errstate(invalid="ignore"):
            found[~np.isfinite(found)] = -0.0
    return found


def some(count: int = 10) -> dict[str, np.ndarray]:
    return {"x": values("float32", count, 2, 3), "y": np.arange(count, dtype=np.uint8)}


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    """A file of each kind; of .npy a folder."""
    if path.suffix == ".safetensors":
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    else:
        path.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    return path


def fetch(path: Path, folder: Path, percent=None, limit=None):
    where = DataArrays(path=str(path), held_out_percent=percent, shuffle=IN_ORDER)
    write_shards(folder, fetched := fetch_into(folder, where, limit))
    return fetched


def read(folder: Path, split: str = "train") -> dict[str, np.ndarray]:
    """All rows of a split."""
    listed = read_shards(folder)
    data = Sequences(folder, listed, split, listed.row_length)
    return decoded(listed.rows, data.take(np.arange(len(data))))


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    return found.keys() == expected.keys() and all(
        (found[n].dtype, found[n].shape) == (expected[n].dtype, expected[n].shape)
        and found[n].tobytes() == expected[n].tobytes()
        for n in expected
    )


# ---- Bit for bit ----


@pytest.mark.parametrize("kind", [".safetensors", ""])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 5), (1, 2, 3)])
def test_each_dtype_comes_back_bit_for_bit(tmp_path, kind, shape):
    dtypes = [dtype for dtype in DTYPES if kind == ".safetensors" or dtype != "bfloat16"]
    arrays = {f"of-{dtype}": values(dtype, 7, *shape) for dtype in dtypes}
    fetched = fetch(write(tmp_path / f"data{kind}", arrays), tmp_path / "out")
    assert [array.name for array in fetched.rows.arrays] == sorted(arrays)
    assert fetched.token_size_in_bytes == 4 and fetched.vocab_size is None
    assert same(read(tmp_path / "out"), arrays)


def test_big_endian_arrays_and_columns_first_have_the_same_values(tmp_path):
    arrays = some()
    other = arrays | {"x": np.asfortranarray(arrays["x"].astype(">f4"))}
    fetch(write(tmp_path / "a", other), tmp_path / "out")
    assert same(read(tmp_path / "out"), arrays)


def test_one_npy_file_is_an_array_of_its_name(tmp_path):
    np.save(tmp_path / "pixels.npy", some()["x"])
    fetch(tmp_path / "pixels.npy", tmp_path / "out")
    assert same(read(tmp_path / "out"), {"pixels": np.load(tmp_path / "pixels.npy")})


def test_files_of_a_folder_are_parts_in_the_order_of_their_names(tmp_path):
    parts = {name: some(count) for name, count in (("b", 3), ("a", 4), ("c", 1))}
    for name, arrays in parts.items():
        write(tmp_path / "data" / f"{name}.safetensors", arrays)
    (tmp_path / "data" / "notes.txt").write_text("not read")
    fetched = fetch(tmp_path / "data", tmp_path / "out")
    assert fetched.source["files"] == [f"{name}.safetensors" for name in "abc"]
    whole = {n: np.concatenate([parts[part][n] for part in "abc"]) for n in "xy"}
    assert same(read(tmp_path / "out"), whole)


def test_more_rows_than_a_shard_or_a_read_holds_come_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "CHUNK_WORDS", 7 * 3)
    monkeypatch.setattr(writing, "SHARD_WORDS", 7 * 10)
    arrays = some(95)
    fetched = fetch(write(tmp_path / "a.safetensors", arrays), tmp_path / "out", 20.0)
    assert len([file for file in fetched.files if file.split == "train"]) > 5
    held_out_N = np.arange(95) % 5 == 4
    assert same(read(tmp_path / "out"), {n: a[~held_out_N] for n, a in arrays.items()})
    assert same(read(tmp_path / "out", "held_out"), {n: a[held_out_N] for n, a in arrays.items()})


# ---- Splits and the order ----


def test_held_out_rows_are_spread_evenly_and_are_in_no_other_split(tmp_path):
    arrays = {"x": np.arange(1000)}
    for percent, count in ((0.1, 1), (3.0, 30), (12.5, 125), (50.0, 500), (99.9, 999)):
        folder = tmp_path / str(percent)
        fetch(write(folder / "a.safetensors", arrays), folder / "out", percent)
        train, held_out = (read(folder / "out", split)["x"] for split in ("train", "held_out"))
        assert len(held_out) == count
        assert sorted([*train, *held_out]) == list(range(1000))
        gaps = np.diff([-1, *held_out])
        assert gaps.max() - gaps.min() <= 1


def test_a_folder_held_out_is_the_held_out_split(tmp_path):
    train, held_out = some(5), some(3)
    write(tmp_path / "data", train)
    write(tmp_path / "data" / "held_out", held_out)
    fetched = fetch(tmp_path / "data", tmp_path / "out")
    assert same(read(tmp_path / "out"), train) and not fetched.warnings
    assert same(read(tmp_path / "out", "held_out"), held_out)
    assert "held_out_percent = 5.0" in refusal(fetch, tmp_path / "data", tmp_path / "b", 5.0)


def test_a_file_named_as_one_to_train_on_but_for_its_split_is_held_out(tmp_path):
    (tmp_path / "data").mkdir()
    for number, name in enumerate(("test", "train-0", "latest", "test-0")):
        save_file({"x": np.full(3 + number, number)}, tmp_path / "data" / f"{name}.safetensors")
    fetch(tmp_path / "data", tmp_path / "out")
    assert set(read(tmp_path / "out")["x"].tolist()) == {0, 1, 2}
    assert set(read(tmp_path / "out", "held_out")["x"].tolist()) == {3}


def test_without_either_nothing_is_held_out_and_a_warning_says_so(tmp_path):
    (warning,) = fetch(write(tmp_path / "a.safetensors", some()), tmp_path / "out").warnings
    assert "so nothing is held out" in warning and str(tmp_path / "a.safetensors") in warning


@pytest.mark.parametrize(
    ("limit", "train"),
    [
        (Limit(tokens=7 * 3 + 6), 3),
        (Limit(steps=2, batch=4, max_seq_len=7), 8),
        (Limit(files=1), 16),
        (Limit(tokens=10**9), 32),
    ],
)
def test_a_limit_takes_the_first_rows_there_are_without_it(tmp_path, limit, train):
    whole = some(40)
    for number in range(2):
        part = {n: a[20 * number : 20 * number + 20] for n, a in whole.items()}
        write(tmp_path / "data" / f"{number}.safetensors", part)
    fetch(tmp_path / "data", tmp_path / "all", 20.0)
    of_all = read(tmp_path / "all")
    fetch(tmp_path / "data", tmp_path / "out", 20.0, limit=limit)
    assert same(read(tmp_path / "out"), {n: a[:train] for n, a in of_all.items()})


def test_a_limit_of_no_row_or_of_another_length_is_refused(tmp_path):
    path = write(tmp_path / "a.safetensors", some())
    other = Limit(steps=1, batch=1, max_seq_len=16)
    assert "download.limit.max_seq_len is 16, expected 7, " in refusal(
        fetch, path, tmp_path / "a", 10.0, limit=other
    )
    assert "download.limit.tokens is 6, expected at least 7" in refusal(
        fetch, path, tmp_path / "b", 10.0, limit=Limit(tokens=6)
    )


# ---- The source's hash ----


def test_the_hash_is_known_before_the_work_and_covers_names_and_contents(tmp_path):
    hashes = []
    for number, (names, count) in enumerate(((("a", "b"), 4), (("a", "b"), 5), (("a", "c"), 5))):
        arrays = dict.fromkeys(names, np.arange(count))
        write(data := tmp_path / f"data{number}", arrays)
        write(data / "held_out", arrays)
        where = DataArrays(path=str(data), shuffle=IN_ORDER)
        known = sources.source_sha256(where, options(tmp_path))
        assert known == fetch(data, tmp_path / f"out{number}").source["sha256"]
        hashes.append(known)
    assert len(set(hashes)) == 3
    assert sources.source_sha256(where, options(tmp_path, Limit(tokens=1))) is None


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, encode = write(tmp_path / "a.safetensors", some()), writing.encode

    def encode_and_touch(*arguments):
        os.utime(path, (1, 1))
        return encode(*arguments)

    monkeypatch.setattr(writing, "encode", encode_and_touch)
    assert f"{path}: changed while it was read" in refusal(fetch, path, tmp_path / "out")


# ---- What is refused ----


def header(shape: object, descr: str = "<f4") -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}"
    text = text.ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text.encode()


def npy(array: np.ndarray) -> bytes:
    packed = io.BytesIO()
    np.save(packed, array)
    return packed.getvalue()


NAN = np.array([[0, 1], [2, np.nan]])
ONES = np.ones(3, np.float32)
WORDS = np.array(["a", "b"])
BAD_FILES = {
    "objects": (
        "a.npy", npy(np.array([{}, 1], object)),
        "Python objects in dtype., expected a file of arrays"),
    "text": ("a.npy", npy(WORDS), "array a is of <U1, expected one of bool"),
    "no axis": ("a.npy", npy(np.array(1.0)), "array a has shape [], expected"),
    "no value": ("a.npy", npy(np.zeros((2, 0))), "array a has shape [2, 0], expected"),
    "no rows": ("a.npy", npy(np.zeros((0, 2))), "array a has no rows, expected some"),
    "nan": ("a.npy", npy(NAN), "array a: found nan in row 1, expected a finite number"),
    "bool": ("a.npy", header((3,), "|b1") + b"\1\0\2", "array a: found 2 in row 2, expected 0 or"),
    "short": ("a.npy", header((4,)) + b"1234", "expected a file of arrays"),
    "long": ("a.npy", header((1,)) + b"12345678", "found 8 bytes after its header, expected 4"),
    "negative": ("a.npy", header((-1, -4)) + b"1234567812345678", "expected a file of arrays"),
    "huge": ("a.npy", header((2**62, 2**62)), "expected a file of arrays"),
    "header": ("a.npy", b"\x93NUMPY\1\0\5\0{((((", "expected a file of arrays"),
    "10^400 numbers": ("a.npy", header((10**400,)), "expected a file of arrays"),
    "nested": ("a.npy", header("(" * 3000), "expected a file of arrays"),
    "an archive": ("a.npy", b"PK\3\4" + bytes(100), "expected a file of arrays"),
    "pickle": ("a.npy", b"\x80\4K\1.", "expected a file of arrays"),
    "empty": ("a.npy", b"", "expected a file of arrays"),
    "no arrays": ("a.safetensors", save({}), "found no arrays, expected some"),
    "its name": (
        "a.safetensors", save({"../x": ONES}), "lists an array named '../x', expected at most 64"),
    "lengths": (
        "a.safetensors", save({"x": ONES, "y": ONES[:2]}),
        "array y has 2 rows, expected 3 as x has"),
    "a zip file": ("a.npz", b"PK\3\4", "expected a file that ends in .npy or .safetensors, which"),
    "float8": (
        "a.safetensors", save({"x": np.zeros(4, ml_dtypes.float8_e4m3fn)}),
        "array x is of float8_e4m3fn, expected one of bool"),
    "infinite": (
        "a.safetensors", save({"x": np.array([1, np.inf]).astype("bfloat16")}),
        "array x: found inf in row 1, expected a finite number"),
    "no tensors": ("a.safetensors", b"12345678abcdef", "expected a safetensors file"),
    "a long row": ("a.npy", header((1, 2**25), "|b1") + bytes(2**25), None),
    "another kind": ("a.csv", b"1,2", "expected a file that ends in .npy or .safetensors"),
}  # fmt: skip


@pytest.mark.filterwarnings("error")  # which would stand before that line
@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line_with_its_name(tmp_path, case, monkeypatch):
    name, content, expected = BAD_FILES[case]
    if expected is None:
        monkeypatch.setattr("pipeline.tokens.rows.MOST_WORDS", 2**20)
        expected = f"expected at most {2**20} words of 4 bytes in a row"
    (tmp_path / name).write_bytes(content)
    message = refusal(fetch, tmp_path / name, tmp_path / "out")
    assert message.count(str(tmp_path / name)) >= 1 and expected in message, message


def test_parts_with_other_rows_are_refused_with_both_files(tmp_path):
    for name, arrays, said in (
        ("dtype", {"x": ONES, "y": ONES.astype(int)}, "array y is int64 [], expected float32 []"),
        ("shape", {"x": ONES.reshape(3, 1), "y": ONES}, "array x is float32 [1], expected float32"),
        ("less", {"x": ONES}, "array y is missing, expected float32 []"),
        ("more", {"x": ONES, "y": ONES, "z": ONES}, "array z is float32 [], expected missing"),
    ):
        folder = tmp_path / name
        write(folder / "a.safetensors", {"x": ONES, "y": ONES})
        write(folder / "b.safetensors", arrays)
        message = refusal(fetch, folder, tmp_path / "out" / name)
        assert message.startswith(f"{folder / 'b.safetensors'}: {said}"), message
        assert message.endswith(f"as in {folder / 'a.safetensors'}")


def test_a_folder_of_several_kinds_or_of_none_and_a_missing_one_are_refused(tmp_path):
    write(tmp_path / "two" / "a.safetensors", some())
    np.save(tmp_path / "two" / "a.npy", some()["x"])
    assert "found .npy and .safetensors files, expected one kind" in refusal(
        fetch, tmp_path / "two", tmp_path / "a"
    )
    (tmp_path / "none").mkdir()
    assert "found no file that ends in .npy" in refusal(fetch, tmp_path / "none", tmp_path / "b")
    message = refusal(fetch, tmp_path / "nowhere", tmp_path / "c")
    assert message.startswith("model.LLM.data_location.Arrays: found no ")


@pytest.mark.parametrize(("percent", "count"), [(1.0, 50), (99.0, 1)])
def test_a_percentage_that_leaves_a_split_empty_is_refused(tmp_path, percent, count):
    message = refusal(
        fetch, write(tmp_path / "a.safetensors", some(count)), tmp_path / "out", percent
    )
    assert f"held_out_percent = {percent} holds out 0 of {count} rows, expected one" in message


# ---- The workload's own ----


def of_workload(folder: Path, percent=None, **arrays: Mapping[str, np.ndarray]):
    folder.mkdir(parents=True)
    where = DataWorkload(held_out_percent=percent, shuffle=IN_ORDER)
    given = replace(options(folder.parent / "store"), dataset=lambda: arrays)
    fetched = sources.fetch(where, folder, given)
    write_shards(folder, fetched)
    assert fetched.source["read"] == "dataset of the workload"
    return fetched


def test_what_a_workload_gives_is_what_it_is_given(tmp_path):
    train, held_out = some(5), some(2)
    of_workload(tmp_path / "out", train=train, held_out=held_out)
    assert same(read(tmp_path / "out"), train)
    assert same(read(tmp_path / "out", "held_out"), held_out)
    of_workload(tmp_path / "part", 20.0, train=train)
    assert len(read(tmp_path / "part", "held_out")["y"]) == 1


def test_the_hash_of_a_workloads_arrays_covers_values_names_and_dtypes(tmp_path):
    x = np.arange(4, dtype=np.int32)
    given = {"a": {"x": x}, "b": {"y": x}, "c": {"x": x.view("<u4")}, "d": {"x": x + 1}}
    hashes = [of_workload(tmp_path / n, train=g).source["sha256"] for n, g in given.items()]
    again = of_workload(tmp_path / "again", train={"x": x}).source["sha256"]
    assert len(set(hashes)) == 4 and again == hashes[0]


def test_a_workloads_bad_arrays_are_refused_with_the_call_that_gave_them(tmp_path):
    message = refusal(of_workload, tmp_path / "a", train={"x": NAN})
    assert message.startswith('model.LLM.data_location.Workload: dataset("train"): array x: found')
    assert "found no arrays to train on" in refusal(of_workload, tmp_path / "b", train={})
    message = refusal(of_workload, tmp_path / "c", train=some(), held_out={"x": ONES})
    assert 'dataset("held_out"): array x is float32 [], expected float32 [2, 3] as in' in message


def test_without_a_workload_its_rows_are_refused(tmp_path):
    message = refusal(sources.fetch, DataWorkload(shuffle=IN_ORDER), tmp_path, options(tmp_path))
    check_names(message, "model.LLM.data_location.Workload", "[workload]")
