"""A stage's folder is whole or not there, and read only as it was made; why it would run again."""

import hashlib
import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_bytes, write_json, write_text
from pipeline.stage import artifacts, keys
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import PROJECT, RUN_FILE, STAGES, needs
from tests import tiny
from tests.errors import refused
from tests.pipeline import finished_run

# ---- A stage's folder is whole or not there, and read only as it was made ----


def paths_of(stage: str, root: Path) -> Paths:
    return Paths(stage, PROJECT / RUN_FILE, root)


def made_of(paths: Paths) -> Path:
    return paths.root / paths.keys.made(paths.stage)


def make(stage: str, root: Path, text: str = "content") -> Paths:
    for need in needs(stage):
        if not paths_of(need, root).is_made(need):
            make(need, root)
    paths = paths_of(stage, root)
    with paths.building() as folder:
        (folder / "part").mkdir()
        (folder / "part" / "file.txt").write_text(text)
    return paths


def test_a_built_folder_lists_its_files_and_can_be_needed(tmp_path):
    paths = make("download", tmp_path)
    manifest = read_json(made_of(paths))
    assert list(manifest["files"]) == ["part/file.txt"]
    assert manifest["key"] == paths.key
    assert paths_of("train", tmp_path).need("download") == paths.out("download")


def test_building_again_leaves_nothing_of_the_old_folder_and_equal_results_are_equal(tmp_path):
    old = make("download", tmp_path / "a").out("download") / "made-000000000000.json"
    old.write_text("{}")
    first, second = (make("download", tmp_path / place, "new") for place in ("a", "b"))
    assert tiny.contents(first.out("download")) == tiny.contents(second.out("download"))
    assert sorted(p.name for p in (tmp_path / "a" / "data").iterdir()) == ["shards"]


def test_what_a_checkout_changed_in_metrics_is_put_right(tmp_path):
    make("train", tmp_path)
    paths = paths_of("witness", tmp_path)
    with paths.building() as folder:
        write_json(folder / "metrics" / "witness.json", {"accepted": True})
    copy = tmp_path / "metrics" / "witness.json"
    assert read_json(copy) == {"accepted": True}
    copy.write_text("another run's")
    paths.publish()
    assert read_json(copy) == {"accepted": True}


def test_a_folder_of_another_key_publishes_nothing(tmp_path):
    paths = paths_of("witness", tmp_path)
    write_json(paths.out("witness") / "metrics" / "witness.json", {})
    paths.publish()
    assert not (tmp_path / "metrics").exists()


def test_a_failed_build_leaves_the_earlier_result_whole(tmp_path):
    paths = make("download", tmp_path)
    with pytest.raises(OSError), paths.building() as folder:
        (folder / "half.txt").write_text("half")
        raise OSError
    assert paths_of("train", tmp_path).need("download").is_dir()


@pytest.mark.parametrize(
    "spoil, named",
    [
        (lambda file: file.write_text("Content"), ("part/file.txt", 7)),
        (lambda file: file.unlink(), ("part/file.txt",)),
        (lambda file: file.with_name("more").write_text(""), ("part/more",)),
    ],
)
def test_a_changed_missing_or_added_file_is_named(tmp_path, spoil, named):
    spoil(make("download", tmp_path).out("download") / "part" / "file.txt")
    with refused(*named):
        paths_of("train", tmp_path).need("download")


def test_a_stage_that_has_not_run_is_named_and_the_run_file_of_engines_needs_no_flag(
    tmp_path, monkeypatch
):
    paths = paths_of("train", tmp_path)
    with refused("stage download", f"lockstep download --run {paths.run}"):
        paths.need("download")
    monkeypatch.chdir(PROJECT)
    with refused("`lockstep download`"):
        Paths("train", Path(RUN_FILE), tmp_path).need("download")


def test_a_result_of_what_was_read_again_and_is_other_now_is_not_current(tmp_path):
    train = make("train", tmp_path)
    make("download", tmp_path)  # again, and the same
    assert paths_of("witness", tmp_path).need("train")
    make("download", tmp_path, "changed")  # under the same key, as a folder without a pin can be
    with refused("data/shards"):
        paths_of("witness", tmp_path).need("train")
    assert not train.has_result()


def test_a_result_is_of_what_was_read_not_of_what_replaced_it_meanwhile(tmp_path):
    make("convert", tmp_path)
    make("download", tmp_path)
    train = paths_of("train", tmp_path)
    train.need("download")
    make("download", tmp_path, "changed")
    with train.building() as folder:
        (folder / "file.txt").write_text("trained on the first")
    assert not train.is_made("train")


def test_a_run_file_that_is_edited_while_a_stage_runs_fails_it_and_the_result_stands(
    tmp_path, monkeypatch
):
    run_file, root = tiny.start(tmp_path)
    text = run_file.read_text()
    edited = text.replace("seed = 0", "seed = 7", 1)
    writes = [f"{text}\n# of no account\n", edited]

    def run(settings: object, paths: Paths) -> None:
        with paths.building():
            run_file.write_text(writes.pop(0))

    monkeypatch.setattr("pipeline.convert.run", run)
    tiny.make(run_file, root, "convert")
    shutil.rmtree(root)
    with refused(run_file, "[model.LLM.checkpoint]", "convert"):
        tiny.make(run_file, root, "convert")
    run_file.write_text(text)
    monkeypatch.setattr(Paths, "publish", lambda _: run_file.write_text(edited))
    with refused(run_file, "[model.LLM.checkpoint]", "convert"):
        tiny.make(run_file, root, "convert")
    monkeypatch.undo()
    run_file.write_text(text)
    assert "exists already" in tiny.make(run_file, root, "convert")


@pytest.mark.long
def test_no_flipped_bit_of_a_made_file_goes_unnoticed(tmp_path):
    made = made_of(make("train", tmp_path))
    whole, content = made.read_bytes(), artifacts.read_made(made)
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        made.write_bytes(flipped)
        with suppress(LockstepError):
            assert artifacts.read_made(made) == content


def test_a_damaged_result_is_named_and_made_again(tmp_path, capsys):
    train = make("train", tmp_path)
    (train.out("train") / "part" / "file.txt").write_text("Content")
    assert not train.has_result()
    assert "part/file.txt: found 7 bytes" in capsys.readouterr().out


def cached(paths: Paths) -> None:
    """Moves a stage's folder to where DVC keeps it."""
    cache, listing = paths.root / ".dvc/cache/files/md5", []
    for name, content in tiny.contents(paths.out(paths.stage)).items():
        md5 = hashlib.md5(content).hexdigest()
        write_bytes(cache / md5[:2] / md5[2:], content)
        listing.append({"md5": md5, "relpath": name})
    write_text(cache / "00" / "00.dir", json.dumps(listing))
    shutil.rmtree(paths.out(paths.stage))


def test_a_result_comes_back_from_the_cache_of_dvc(tmp_path):
    train = make("train", tmp_path)
    before = tiny.contents(train.out("train"))
    cached(train)
    assert train.has_result()
    assert tiny.contents(train.out("train")) == before


def test_a_damaged_or_outdated_cache_of_dvc_is_passed_over(tmp_path):
    train = make("train", tmp_path)
    cached(train)
    make("download", tmp_path, "changed")
    assert not train.has_result()
    make("download", tmp_path)
    (file,) = (f for f in (tmp_path / ".dvc").rglob("*") if f.is_file() and f.stat().st_size == 7)
    file.write_text("Content")
    assert not train.has_result()


@pytest.mark.parametrize(
    "content",
    [b"", b'[{"md5', b"\xff", b"{}", b"[1]", b'[{"md5": 1, "relpath": "a"}]', b"[{}]", None],
)
def test_what_cannot_be_read_in_the_cache_of_dvc_is_no_result(tmp_path, content):
    train = make("train", tmp_path)
    cached(train)
    damaged = tmp_path / ".dvc/cache/files/md5/00/0.dir"
    damaged.mkdir() if content is None else damaged.write_bytes(content)
    assert train.has_result()
    shutil.rmtree(tmp_path / ".dvc/cache/files/md5/00/")
    write_bytes(damaged, content or b"")
    shutil.rmtree(train.out("train"))
    assert not train.has_result()


def test_what_a_stage_read_outside_is_read_again(tmp_path):
    download = make("download", tmp_path)
    cached(download)
    assert not download.has_result()


def test_work_in_progress_lies_where_dvc_started(tmp_path, monkeypatch):
    monkeypatch.setenv("DVC_ROOT", str(tmp_path / "project"))
    assert paths_of("train", tmp_path / "copy").scratch.parent == tmp_path / "project/data/runs"


# ---- What runs again, and why, is said before it does ----

CHANGED = "changed since its result: "


def test_a_finished_run_runs_nothing_again_and_a_change_is_named_where_it_matters(
    tmp_path, monkeypatch
):
    run_file = finished_run.finish(tmp_path)
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found == dict.fromkeys(STAGES) | {"report": "it has no result yet"}

    text = run_file.read_text()
    run_file.write_text(text.replace("replay_percent = 25", "replay_percent = 50"))
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["train"] is None
    assert found["witness"] == CHANGED + "[witness]"
    assert found["export"] == CHANGED + "stage witness"
    run_file.write_text(text)

    digest = keys.digest_of_source
    with monkeypatch.context() as patch:
        edited = lambda path: "edited" if path.name == "start" else digest(path)  # noqa: E731
        patch.setattr(keys, "digest_of_source", edited)
        found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["convert"] is None
    assert found["train"] == CHANGED + "pipeline/start"
    assert found["witness"] == CHANGED + "pipeline/start, stage train"

    shutil.rmtree(tmp_path / "data" / "init")
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["convert"] == "it has no result yet"
    assert found["train"] == "its result is made from a different data/init than the current one"

    (made,) = (tmp_path / "data" / "shards").glob("made-*.json")
    write_json(made.with_name("made-0123456789ab.json"), {"sha256": ""})
    made.unlink()
    found = artifacts.rerun_reasons(run_file, tmp_path)
    assert found["download"] == "its result is damaged, or of an older release"
