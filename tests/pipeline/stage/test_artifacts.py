"""A stage's folder is whole or not there, and read only as it was made."""

import errno
import os
from pathlib import Path

import pytest

from pipeline.errors import LockstepError
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import PROJECT, RUN_FILE


def paths_of(stage: str, root: Path) -> Paths:
    return Paths(stage, PROJECT / RUN_FILE, root)


def make(stage: str, root: Path, text: str = "content") -> Paths:
    paths = paths_of(stage, root)
    with paths.building() as folder:
        (folder / "part").mkdir()
        (folder / "part" / "file.txt").write_text(text)
    return paths


def test_a_built_folder_lists_its_files_and_can_be_needed(tmp_path):
    paths = make("download", tmp_path)
    manifest = artifacts.read_json(tmp_path / paths.keys.made("download"))
    assert list(manifest["files"]) == ["part/file.txt"]
    assert manifest["key"] == paths.key
    assert paths_of("train", tmp_path).need("download") == paths.out("download")


def test_building_again_leaves_nothing_of_the_old_folder(tmp_path):
    old = make("download", tmp_path).out("download") / "made-000000000000.json"
    old.write_text("{}")
    paths = make("download", tmp_path, "new")
    assert not old.exists()
    assert (paths.out("download") / "part" / "file.txt").read_text() == "new"
    assert sorted(p.name for p in (tmp_path / "data").iterdir()) == ["shards"]


def test_equal_results_are_equal_folders(tmp_path):
    first, second = make("download", tmp_path / "a"), make("download", tmp_path / "b")
    made = [p.root / p.keys.made("download") for p in (first, second)]
    assert made[0].read_bytes() == made[1].read_bytes()


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_json_does_not_have_is_refused(tmp_path, number):
    (tmp_path / "config.json").write_text(f'{{"unread": [{number}]}}')
    with pytest.raises(LockstepError, match=f"config.json: expected JSON: {number} is not a fini"):
        artifacts.read_json(tmp_path / "config.json")


def test_what_a_checkout_changed_in_metrics_is_put_right(tmp_path):
    paths = paths_of("witness", tmp_path)
    with paths.building() as folder:
        artifacts.write_json(folder / "metrics" / "witness.json", {"accepted": True})
    copy = tmp_path / "metrics" / "witness.json"
    assert artifacts.read_json(copy) == {"accepted": True}
    copy.write_text("another run's")
    paths.publish()
    assert artifacts.read_json(copy) == {"accepted": True}


def test_a_folder_of_another_key_publishes_nothing(tmp_path):
    paths = paths_of("witness", tmp_path)
    artifacts.write_json(paths.out("witness") / "metrics" / "witness.json", {})
    paths.publish()
    assert not (tmp_path / "metrics").exists()


def test_a_failed_build_leaves_the_earlier_result_whole(tmp_path):
    paths = make("download", tmp_path)
    with pytest.raises(OSError), paths.building() as folder:
        (folder / "half.txt").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert paths_of("train", tmp_path).need("download").is_dir()


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda file: file.write_text("Content"), "file.txt: found 7 bytes"),
        (lambda file: file.unlink(), "file.txt: found no such file"),
        (lambda file: file.with_name("more").write_text(""), "expected no such file"),
    ],
)
def test_a_changed_missing_or_added_file_is_named(tmp_path, spoil, text):
    spoil(make("download", tmp_path).out("download") / "part" / "file.txt")
    with pytest.raises(LockstepError, match=text):
        paths_of("train", tmp_path).need("download")


def test_a_stage_that_has_not_run_is_named(tmp_path):
    with pytest.raises(LockstepError, match="expected from stage download.*lockstep download"):
        paths_of("train", tmp_path).need("download")


def test_work_in_progress_lies_where_dvc_started(tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "project"))
    assert paths_of("train", tmp_path / "copy").scratch.parent == tmp_path / "project/data/runs"


def test_a_failed_write_leaves_the_earlier_file_and_no_other(tmp_path, monkeypatch):
    file = tmp_path / "metrics.json"
    artifacts.write_json(file, {"loss": 1.0})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LockstepError, match="metrics.json: No space left on device, expected to"):
        artifacts.write_json(file, {"loss": 2.0})
    assert artifacts.read_json(file) == {"loss": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.json"]


def test_json_with_a_number_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError):
        artifacts.write_json(tmp_path / "a.json", {"loss": float("nan")})


@pytest.mark.parametrize("content", ["", "{"])
def test_a_broken_json_file_is_named(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(LockstepError, match="a.json: expected JSON"):
        artifacts.read_json(tmp_path / "a.json")
