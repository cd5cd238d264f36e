"""Files of a publication that would take a reader's memory or time, or end in a traceback."""

import gzip
import json
import random

import pytest

from lockstep.errors import LockstepError
from lockstep.files import write_json
from lockstep.programs.columns import PLAIN
from parts.publication import fetch, transcript
from parts.publication.layout import MANIFEST, ROUNDS, Publication, made
from pipeline.recheck.outputs import TRANSCRIPT
from pipeline.stage.artifacts import _digest
from tests.errors import refused
from tests.parts.publication.published_run import change_json, entry, verify


@pytest.mark.parametrize(
    "left, most, why",
    [
        (10**6, 998, "header.json: 1000 bytes, expected at most 998, "),
        (10**6, 10**6, "rounds.jsonl.gz: 1000000 bytes, expected at most 999000, "),
        (10**6 + 1, 10**8, "rounds.jsonl.gz: 1000000 bytes unpacked, expected 1000001"),
        (10**7, 10**8, "rounds.jsonl.gz: 1003 bytes unpack to 10000000 and more, expected at most"),
    ],
)
def test_what_is_unpacked_has_the_size_that_was_left_and_what_other_files_leave(
    tmp_path, left, most, why
):
    files = {f"{TRANSCRIPT}/header.json": bytes(1000), ROUNDS: gzip.compress(bytes(10**6))}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    file = {"bytes": left, "sha256": "ab" * 32}
    train = dict.fromkeys(("needs", "content", "tables", "environment"), {})
    train |= {"key": "k", "files": {"transcript/rounds.jsonl": file}}
    write_json(tmp_path / made("train"), train | {"sha256": _digest(train)})
    listed = {name: entry(tmp_path / name) for name in files}
    publication = Publication(
        format=3, release="0", commit=None, rounds="ab" * 32, windows=1, seed=None, columns=PLAIN,
        files=listed,
    )  # fmt: skip
    with pytest.raises(LockstepError, match=why):
        transcript.unpack(tmp_path, tmp_path / "aside", publication, set(), most)


@pytest.mark.parametrize("size", [0, 3, 4, 7, 4 * transcript.PIECE + 5])
def test_planes_are_joined_in_pieces(tmp_path, size):
    data = random.Random(0).randbytes(size)
    (tmp_path / "own").write_bytes(data)
    transcript.pack(tmp_path / "own", tmp_path / "own.planes.gz")
    transcript.unpack_file(tmp_path / "own.planes.gz", tmp_path / "again", size)
    assert (tmp_path / "again").read_bytes() == data
    assert {path.name for path in tmp_path.iterdir()} == {"own", "own.planes.gz", "again"}


def test_lists_too_deep_in_one_another_are_one_line(tmp_path, monkeypatch):
    def found(*_: object, **__: object):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(fetch, "find", found)
    with pytest.raises(LockstepError, match="maximum recursion depth exceeded, expected "):
        verify(tmp_path / "published")


@pytest.mark.parametrize("columns", [[], ["labels"], ["inputs", "inputs"]])
def test_columns_have_the_inputs_and_none_twice(folder, columns):
    change_json(MANIFEST, lambda listed: listed.update(columns=columns))(folder)
    with refused("publication.json: columns is [", json.dumps(columns)):
        verify(folder)
