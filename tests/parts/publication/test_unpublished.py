"""What is not published: refused exports, outputs without a check, secrets, names of a machine."""

import json
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.errors import LockstepError
from parts.publication import publish
from pipeline import evaluate, runfile
from pipeline.stage import lock
from tests import tiny
from tests.errors import refused


def test_a_new_output_is_not_published_before_a_line_says_how_it_is_checked(
    published, tmp_path, monkeypatch
):
    root, write = shutil.copytree(published.root, tmp_path / "root"), evaluate._write

    def write_more(*arguments) -> None:
        write(*arguments)
        (arguments[-1] / "new.json").write_text("{}")

    monkeypatch.setattr(evaluate, "_write", write_more)
    shutil.rmtree(root / "data/evaluate")
    tiny.make(published.run_file, root, "evaluate")
    with refused("data/evaluate/new.json", "pipeline/recheck/outputs.py"):
        publish.write(tmp_path / "new", published.run_file, root, 1, None)
    assert {path.name for path in tmp_path.iterdir()} == {"root"}


def test_a_card_of_the_report_that_was_edited_is_not_published(published, tmp_path):
    root = shutil.copytree(published.root, tmp_path / "root")
    (root / "data/report/README.md").write_text("another")
    with refused("README.md", 7):
        publish.write(tmp_path / "new", published.run_file, root, 1, None)


def test_files_of_others_are_not_replaced_and_no_secret_is_published(published, tmp_path):
    (tmp_path / "mine.txt").touch()
    with refused(tmp_path):
        publish.write(tmp_path, published.run_file, published.root, 1, None)
    signed = {"Url": {"url": "https://example.org/a.ds?signature=secret"}}
    run_file = tmp_path / "signed.toml"
    tiny.write_run(run_file, tiny.run_document(Path(), model__LLM__data_location=signed))
    with pytest.raises(LockstepError, match="has a user, a password or a query") as caught:
        publish.write(tmp_path / "new", run_file, published.root, 1, None)
    assert "secret" not in str(caught.value)


def test_a_folder_that_another_publish_fills_meanwhile_keeps_its_files(published, tmp_path):
    folder, lock_file = tmp_path / "new", published.root / "data/.export.lock"
    arguments = folder, published.run_file, published.root, 1, None
    with ThreadPoolExecutor() as pool:
        with lock.hold(lock_file):  # as the other one does from its first look at the folder on
            waiting = pool.submit(publish.write, *arguments)
            wait([waiting], timeout=0.5)
            assert not waiting.done()
            folder.mkdir()
            (folder / "theirs.txt").touch()
        with refused(folder, "has files"):
            waiting.result()
    assert {path.name for path in tmp_path.rglob("*")} == {"new", "theirs.txt"}


def test_the_published_run_file_names_nothing_of_a_machine_and_is_valid_on_the_walls_clock():
    runtime = {"carrier": "processes", "by_hand": [1], "listen": "10.0.0.7:5000"}
    said = publish.public(tiny.parsed(links__clock="wall", runtime=runtime))
    assert "10.0.0.7" not in json.dumps(said) and not said["runtime"]["by_hand"]
    assert runfile.parse(said, "run.json").links.clock == "wall"


def test_the_printed_verify_command_is_one_that_a_shell_reads(tmp_path, monkeypatch, capsys):
    written = SimpleNamespace(exported={}, files={}, size=0, row_files=(), commit=None)
    monkeypatch.setattr(publish, "write", lambda *_: (written, 0))
    publish.show(tmp_path / "a run", tmp_path / "run.toml", tmp_path, 1, None, None)
    command = capsys.readouterr().out.rpartition("; ")[2]
    assert shlex.split(command) == ["lockstep", "verify", str(tmp_path / "a run")]
