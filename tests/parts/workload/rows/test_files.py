"""Files of any content: copied under their hashes, which are the rows."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from parts.workload.rows import files as provider
from parts.workload.tables import DataFiles
from pipeline import sources
from pipeline.runfile.data import Limit, ShuffleDontShuffle
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards, write_shards
from tests.pipeline.sources.options import fetch_into, options, refusal

IN_ORDER = ShuffleDontShuffle()


@pytest.fixture
def root(tmp_path) -> Path:
    """A folder of files, one of them empty and one below."""
    (folder := tmp_path / "files").mkdir()
    for number in range(10):
        (folder / f"{number}.tar").write_bytes(bytes([number]) * 1000 * number)
    (folder / "below").mkdir()
    (folder / "below" / "a.jpg").write_bytes(b"a picture")
    (folder / ".hidden").write_bytes(b"not read")
    return folder


def fetch(root: Path, folder: Path, pattern="*", percent=None, limit=None):
    where = DataFiles(path=str(root), pattern=pattern, held_out_percent=percent, shuffle=IN_ORDER)
    fetched = fetch_into(folder, where, limit)
    write_shards(folder, fetched)
    return fetched


def paths(folder: Path, split: str = "train") -> list[Path]:
    """The files of a split, by the hashes that are its rows."""
    listed = read_shards(folder)
    rows_NW = Sequences(folder, listed, split, listed.row_length)
    rows_NW = rows_NW.take(np.arange(len(rows_NW)))
    return [folder / listed.rows.folder / row.astype("<i4").tobytes().hex() for row in rows_NW]


def contents(*found: Path) -> list[bytes]:
    return [path.read_bytes() for path in found]


def test_each_file_is_a_row_of_its_hash_and_is_copied_under_it(root, tmp_path):
    fetched = fetch(root, tmp_path / "out")
    found = paths(tmp_path / "out")
    names = [*(f"{number}.tar" for number in range(10)), "below/a.jpg"]
    assert contents(*found) == contents(*(root / name for name in names))
    for path in found:
        assert path.parent == tmp_path / "out" / "files"
        assert path.name == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sorted(os.listdir(tmp_path / "out" / "files")) == sorted(path.name for path in found)
    assert fetched.rows.model_dump() == {"kind": "files", "folder": "files"}
    assert fetched.row_length == 8 and fetched.token_size_in_bytes == 4


def test_the_copy_stays_as_it_is_when_the_file_changes(root, tmp_path):
    fetch(root, tmp_path / "out", "1.tar")
    (path,) = paths(tmp_path / "out")
    with open(root / "1.tar", "r+b") as file:
        file.write(b"x")
    assert path.read_bytes() == bytes([1]) * 1000


@pytest.mark.parametrize(
    ("pattern", "count"), [("*.tar", 10), ("*.jpg", 1), ("[0-4].tar", 5), ("below/*", 1)]
)
def test_a_pattern_says_which_files(root, tmp_path, pattern, count):
    fetch(root, tmp_path / "out", pattern)
    assert len(paths(tmp_path / "out")) == count


def test_files_are_held_out_by_a_percentage_or_by_their_folder(root, tmp_path):
    fetch(root, tmp_path / "a", "*.tar", 20.0)
    held_out = contents(*paths(tmp_path / "a", "held_out"))
    assert held_out == contents(root / "4.tar", root / "9.tar")
    assert not set(held_out) & set(contents(*paths(tmp_path / "a")))
    (root / "held_out").mkdir()
    (root / "held_out" / "z.tar").write_bytes(b"z")
    fetch(root, tmp_path / "b", "?.tar")
    assert contents(*paths(tmp_path / "b", "held_out")) == [b"z"]
    assert len(paths(tmp_path / "b")) == 10
    assert "held_out_percent = 20.0" in refusal(fetch, root, tmp_path / "c", "*", 20.0)


def test_a_folder_named_as_one_to_train_on_but_for_its_split_is_held_out(tmp_path):
    for name in ("train/001.png", "train/002.png", "test/117.png", "contest/1.png"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_bytes(name.encode())
    fetch(tmp_path / "root", tmp_path / "out")
    assert contents(*paths(tmp_path / "out", "held_out")) == [b"test/117.png"]
    assert len(paths(tmp_path / "out")) == 3


@pytest.mark.parametrize(
    "limit", [Limit(files=3), Limit(tokens=31), Limit(steps=3, batch=1, max_seq_len=8)]
)
def test_a_limit_takes_the_first_files_and_copies_no_others(root, tmp_path, limit):
    fetch(root, tmp_path / "out", "*.tar", limit=limit)
    assert contents(*paths(tmp_path / "out")) == contents(*(root / f"{n}.tar" for n in range(3)))
    assert len(os.listdir(tmp_path / "out" / "files")) == 3


def test_files_of_equal_content_are_rows_each_and_one_copy(root, tmp_path):
    (root / "again.tar").write_bytes((root / "3.tar").read_bytes())
    warnings = fetch(root, tmp_path / "out", "*.tar").warnings
    assert len(paths(tmp_path / "out")) == 11
    assert len(os.listdir(tmp_path / "out" / "files")) == 10
    assert "1 files have the content of another, as again.tar that of 3.tar" in warnings


def test_the_hash_is_known_before_the_work_and_covers_names_and_contents(root, tmp_path):
    hashes = []
    for number in range(3):
        where = DataFiles(path=str(root), shuffle=IN_ORDER)
        known = sources.source_sha256(where, options(tmp_path))
        assert known == fetch(root, tmp_path / f"out{number}").source["sha256"]
        hashes.append(known)
        if number == 1:
            os.rename(root / "3.tar", root / "x.tar")
        if number == 0:
            (root / "3.tar").write_bytes(b"other")
    assert len(set(hashes)) == 3


def test_a_file_that_changes_while_it_is_copied_is_refused(root, tmp_path, monkeypatch):
    find = provider._find

    def find_and_change(*arguments):
        found = find(*arguments)
        (root / "5.tar").write_bytes(b"other")
        return found

    monkeypatch.setattr(provider, "_find", find_and_change)
    assert f"{root}/5.tar: changed while it was read" in refusal(fetch, root, tmp_path / "out")


def test_a_missing_folder_or_one_without_such_files_is_refused(root, tmp_path):
    message = refusal(fetch, tmp_path / "nowhere", tmp_path / "a")
    assert message.startswith("model.LLM.data_location.Files: found no folder")
    message = refusal(fetch, root, tmp_path / "b", "*.png")
    assert f"{root} has no file like *.png, expected some" in message
    message = refusal(fetch, root, tmp_path / "c", "1.tar", 50.0)
    assert "held_out_percent = 50.0 holds out 0 of 1 rows" in message
