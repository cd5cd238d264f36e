"""A pinned run reads what it read when it was pinned, or refuses."""

import shutil
import subprocess
from pathlib import Path

import pytest
import tomlkit

from lockstep.files import read_json
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths, read_made
from pipeline.stage.keys import STAGES, Keys
from tests import tiny
from tests.errors import check_names, refused

pytestmark = pytest.mark.long


@pytest.fixture
def place(tmp_path) -> tuple[Path, Path, Path]:
    """A run that starts from a Hugging Face folder: its run file, its root, and that folder."""
    run_file, _ = tiny.start(tmp_path)
    tiny.make(run_file, tmp_path, "convert")
    model = (tmp_path / "data" / "init" / "hf").rename(tmp_path / "model")
    tiny.start(tmp_path, model__LLM__checkpoint={"Hub": {"repo_id": str(model)}})
    return run_file, tmp_path, model


def pin(run_file: Path, root: Path) -> subprocess.CompletedProcess:
    return tiny.python("-m", "pipeline", "pin", "--run", run_file, "--root", root)


def test_what_is_pinned_is_not_made_again_and_refuses_what_has_changed(place):
    run_file, root, model = place
    assert tiny.make(run_file, root, "download", "convert").count("not pinned") == 2
    before, made = run_file.read_text(), tiny.contents(root / "data")
    run_file.chmod(0o640)
    keys = {stage: Keys(run_file).key(stage) for stage in STAGES}
    assert pin(run_file, root).returncode == 0
    written = tomlkit.parse(run_file.read_text())["pins"]
    assert written["data"] == read_json(root / "data/shards/shards.json")["source"]["sha256"]
    assert written["checkpoint"] == read_json(root / "data/init/source.json")["sha256"]
    changed = [
        new for new, old in zip(run_file.read_text().splitlines(), before.splitlines(), strict=True)
        if new != old
    ]  # fmt: skip
    assert [line.split()[0] for line in changed] == ["data", "checkpoint"]
    assert run_file.stat().st_mode & 0o777 == 0o640
    assert {stage: Keys(run_file).key(stage) for stage in STAGES} == keys
    assert tiny.make(run_file, root, "download", "convert").count("exists already") == 2
    assert tiny.contents(root / "data") == made
    shutil.rmtree(root / "data/shards")
    assert tiny.make(run_file, root, "download").count(", pinned)") == 1
    assert tiny.contents(root / "data/shards") == {
        name.removeprefix("shards/"): data
        for name, data in made.items()
        if name.startswith("shards/")
    }

    # the folders made under the pins are whole, but what they were made from has changed
    run_file.write_text(run_file.read_text() + "\n")
    (root / "tokens" / "b.ds").write_bytes(b"\1\0" * 100)
    (model / "generation_config.json").write_text("{}")
    for stage, out in (("download", "shards"), ("convert", "init")):
        made = tiny.contents(root / "data" / out)
        for path in (root / "data" / out).glob("made-*.json"):
            path.rename(root / path.name)  # an engine would have it run again
        process = tiny.lockstep(stage, run_file, root)
        line = process.communicate()[0].splitlines()[-1]
        assert process.returncode == 1
        assert line.startswith("error: [pins] ") and "expected what was pinned" in line
        for path in root.glob("made-*.json"):
            path.rename(root / "data" / out / path.name)
        assert tiny.contents(root / "data" / out) == made


def test_a_result_of_what_is_not_pinned_is_not_current(place):
    """Neither for a stage that needs it, nor for Snakemake, which asks for its name alone."""
    run_file, root, _ = place
    tiny.make(run_file, root, "download")
    paths = Paths("download", run_file, root)
    read, other = read_made(paths.made("download"))["inputs"]["data"], "ab" * 32
    run_file.write_text(run_file.read_text().replace('data = ""', f'data = "{read}"'))
    pinned = Paths("download", run_file, root)
    assert pinned.has_result()
    pinned.check_pinned()
    run_file.write_text(run_file.read_text().replace(read, other))
    wrong = Paths("download", run_file, root)
    assert wrong.key == paths.key and not wrong.has_result()
    for check in (wrong.check_pinned, lambda: wrong.made("download")):
        with refused("made-", "[pins] data", read, other, "lockstep download"):
            check()
    with refused("[pins] data", read, other):  # it runs again, and reads the same
        tiny.make(run_file, root, "download")


def test_there_is_nothing_to_pin_before_the_stages_have_run(place):
    run_file, root, _ = place
    done = pin(run_file, root)
    assert done.returncode == 1
    check_names(done.stderr, "stage download", "lockstep download")


def test_what_was_changed_since_is_not_pinned(place):
    run_file, root, _ = place
    tiny.make(run_file, root, "download", "convert")
    before, source = run_file.read_text(), root / "data" / "init" / "source.json"
    source.write_text(source.read_text().replace("sha256", "sha265"))
    with refused("source.json"):
        pins.write(run_file, root)
    assert run_file.read_text() == before


def test_pins_of_a_file_with_a_base_are_in_that_file(place):
    run_file, root, _ = place
    tiny.make(run_file, root, "download", "convert")
    before = run_file.read_text()
    like = run_file.with_name("like.toml")
    like.write_text('base = "run.toml"\n')
    found = pins.write(like, root)
    assert found["data"] and tomlkit.parse(like.read_text())["pins"] == found
    assert run_file.read_text() == before
