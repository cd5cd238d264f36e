"""A training of a comparison as a process: once for all that share it, and how it may end."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lockstep.errors import DivergedError
from lockstep.files import write_json
from parts.comparison import training_process
from tests.errors import refused


def test_two_comparisons_at_once_train_what_they_share_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_process, "keys_of", lambda content, *stages: list(stages))
    monkeypatch.setattr(training_process, "_run", lambda stage, run_file, root: 0)
    ended, began = [], threading.Barrier(2)

    def trains(run_file: Path, root: Path) -> dict:
        assert run_file.is_file()
        time.sleep(0.2)  # of the other, which waits
        ended.append(root)
        return {"loss": None, "why": "it diverged"}

    def trained(_: int) -> dict:
        began.wait()
        return training_process.trained({"peers": {"count": 4}})

    monkeypatch.setattr(training_process, "_train", trains)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(trained, range(2))
    assert first == second and first["why"] == "it diverged" and len(ended) == 1


def _runs(program: str, folder: Path, monkeypatch) -> None:
    """Have each stage run a program instead."""
    folder.mkdir(exist_ok=True)
    (folder / "pipeline.py").write_text(program)
    monkeypatch.setattr("sys.path", [str(folder), *sys.path])


def test_a_training_diverged_if_its_exit_status_says_so_whatever_its_words_are(
    tmp_path, monkeypatch
):
    said = "error: data/diverged/x: No space left on device"
    for status in (DivergedError.status, 1):
        _runs(
            f"import sys; print({said!r}); sys.exit({status})", tmp_path / str(status), monkeypatch
        )
        with refused("data/diverged/x", "No space left") as raised:
            training_process._run("train", tmp_path / "run.toml", tmp_path)
        assert isinstance(raised.value, DivergedError) == (status == DivergedError.status)


def test_a_stage_finds_what_a_user_names_from_here_and_its_source_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.py").write_text("a file of the user")
    _runs("import os; print(os.getcwd())", tmp_path / "source", monkeypatch)
    training_process._run("train", tmp_path / "run.toml", tmp_path)
    assert (tmp_path / "train.log").read_text() == f"{tmp_path}\n"


def test_a_training_that_the_kernel_ends_is_said_to_be_and_its_log_named(tmp_path, monkeypatch):
    program = "import os; print('error: train: round 2/3', flush=True); os.kill(os.getpid(), 9)"
    _runs(program, tmp_path, monkeypatch)
    with refused(tmp_path / "train.log", "signal 9"):
        training_process._run("train", tmp_path / "run.toml", tmp_path)


def test_a_training_that_measured_nothing_has_not_diverged(tmp_path, monkeypatch):
    monkeypatch.setattr(training_process, "_run", lambda stage, run_file, root: 0)
    write_json(tmp_path / "metrics" / "train.json", {"held_out_loss": None})
    with refused(tmp_path / "run.toml", "held-out"):
        training_process._train(tmp_path / "run.toml", tmp_path)
