"""What `shards.json` lists of a folder's files, and which lists and folders are refused."""

import os

import numpy as np
import pytest

from pipeline.tokens.shards import ShardFile, count_tokens, duplicates, read_shards
from tests.errors import check_names
from tests.pipeline.sources.options import refusal
from tests.pipeline.tokens.shards_folder import (
    edit,
    elsewhere,
    measure,
    open_shards,
    shards_folder,
    write,
)


def test_what_is_damaged_or_missing_of_the_folder_is_refused_with_its_name(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8), np.arange(8)])
    shard = folder / "train" / "00001.ds"
    os.truncate(shard, 14)
    assert f"{shard}: found 14 bytes, expected 16" in refusal(open_shards, folder, "train", 4)
    shard.unlink()
    assert str(shard) in refusal(open_shards, folder, "train", 4)
    (folder / "shards.json").write_text("{")
    assert str(folder / "shards.json") in refusal(open_shards, folder, "train", 4)
    (folder / "shards.json").unlink()
    assert str(folder / "shards.json") in refusal(open_shards, folder, "train", 4)


def test_a_length_that_is_not_a_multiple_of_the_token_size_is_refused():
    assert count_tokens(6, 2, "a.ds") == 3
    for length, size in ((5, 2), (6, 4), (0, 2)):
        check_names(refusal(count_tokens, length, size, "a.ds"), "a.ds", length, size)


ANOTHER = "expected 2: another release wrote it; run the stage download again"


def part_document(weight: float | None) -> dict:
    return {"shuffle": "DontShuffle", "weight": weight}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("format: missing", lambda document: document.pop("format")),
        (f"format is 1, {ANOTHER}", lambda document: document.update(format=1)),
        (f"format is 3, {ANOTHER}", lambda document: document.update(format=3, more={})),
        ("files[0].tokens", lambda document: document["files"][0].update(tokens=0)),
        ("files[0].path", lambda document: document["files"][0].update(path="../outside.ds")),
        ("files[0].path", lambda document: document["files"][0].update(path="/train/00000.ds")),
        ("files[0].path", lambda document: document["files"][0].update(path="train/../../x.ds")),
        ("files is ", lambda document: document["files"][0].update(sha256=None)),
        ("files is ", lambda document: document["files"][0].update(part=1)),
        ("columns", lambda document: document.update(columns=["labels"])),
        ("columns", lambda document: document.update(columns=["inputs", "labels", "labels"])),
        (
            "parts",
            lambda document: document.update(parts=[part_document(0.5), part_document(None)]),
        ),
        ("shuffle", lambda document: document.update(shuffle={"Seeded": [1, 2]})),
    ],
)
def test_malformed_shards_json_is_refused_naming_the_key(tmp_path, key, change):
    folder = shards_folder(tmp_path, [np.arange(8)])
    edit(folder, change)
    message = refusal(open_shards, folder, "train", 4)
    assert f"{folder / 'shards.json'}: {key}" in message


def test_files_of_equal_content_are_named_each_with_the_first(tmp_path):
    folder = shards_folder(tmp_path, [[1], [2], [1]], [[2]])
    files = list(measure(folder, 2))
    names = ["train/00000.ds", "train/00001.ds", "held_out/00000.ds"]

    def pairs(files: list[ShardFile]) -> list[tuple[str, str]]:
        write(folder, files)
        return duplicates(read_shards(folder))

    assert pairs(files) == [(names[0], "train/00002.ds"), (names[1], names[2])]
    assert pairs(files[:2]) == []
    sums = [f"sha256:{files[0].sha256}", "md5:00", "md5:00", None]
    far = [elsewhere(f, "http://x/y", 2, checksum=c) for f, c in zip(files, sums, strict=True)]
    assert pairs([files[0], *far[1:]]) == [(names[1], "train/00002.ds")]
    assert pairs([far[0], files[1], files[2]]) == [(names[0], "train/00002.ds")]
