"""The files of a stranger's bundle are checked before one is opened, and against their hashes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.files import write_json
from pipeline import runfile
from pipeline.audit import bundle, unchecked_bundle
from pipeline.stage.keys import PROJECT, RUN_FILE
from tests.errors import refused
from tests.pipeline.audit.bundle.bundled_run import OPENING, change_json

pytestmark = pytest.mark.long


def put(make: Callable[[Path], object], name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


STRANGE = {
    "a pipe for the manifest": (put(os.mkfifo, "bundle.json"), "not a regular file"),
    "a pipe nobody lists": (put(os.mkfifo, "transcript/x"), "not a regular file"),
    "a link to a folder": (put(lambda path: path.symlink_to("/etc"), "etc"), "a link to /etc"),
    "too many threads": (
        lambda f: change_json(f / "run.json", lambda r: r["peers"].update(threads=3000)),
        "peers.threads is 3000",
    ),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_could_harm_the_machine_is_refused_before_it_is_opened(tmp_path, case):
    change, said = STRANGE[case]
    write_json(tmp_path / "run.json", runfile.load(PROJECT / RUN_FILE).model_dump(mode="json"))
    (tmp_path / "transcript").mkdir()
    assert unchecked_bundle.read_run(tmp_path, 4).peers.threads == 4
    change(tmp_path)
    with refused(said):
        unchecked_bundle.read_run(tmp_path, 4)


def test_the_senders_settings_of_a_machine_count_for_nothing_whatever_their_release(tmp_path):
    run = runfile.load(PROJECT / RUN_FILE).model_dump(mode="json")
    run["runtime"] |= {"memory_gb": 1e9, "of_another_release": 1}
    write_json(tmp_path / "run.json", run)
    assert unchecked_bundle.read_run(tmp_path, 4).runtime == runfile.Runtime()


@pytest.mark.parametrize("name", ["run.json", f"{OPENING}/own-001.safetensors"])
def test_every_file_is_checked_against_its_hash(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    with refused(name, "bundle.json"):
        bundle.read(folder, 1)


def test_files_that_are_missing_or_too_many_are_named(folder):
    for name, *said in (("x\x1b", r"'x\x1b'"), ("x", "'x'", "e3b0c44298fc", "no file")):
        (folder / name).touch()
        with refused(*said):
            bundle.read(folder, 1)
        (folder / name).unlink()
    (folder / "tokens.safetensors").unlink()
    with refused("'tokens.safetensors'", "no file"):
        bundle.read(folder, 1)
