"""Killed at any moment and started again by either engine, a run ends with the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from itertools import cycle
from pathlib import Path

import pytest

from pipeline.stage.keys import OUT, RUN_FILE, STAGES
from tests import tiny

ENGINES = {"dvc": ("dvc", "repro", "-q"), "snakemake": ("snakemake", "-q", "all")}


def kill_after(project: Path, engine: str, seconds: float, only_the_engine: bool) -> bool:
    """Starts an engine and kills it, or all it started; whether it was still running."""
    process = subprocess.Popen(
        ENGINES[engine],
        cwd=project,
        env=tiny.environment(project),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(seconds)
    running = process.poll() is None
    if running:
        (os.kill if only_the_engine else os.killpg)(process.pid, signal.SIGKILL)
    process.wait()
    return running


def expect_equal(project: Path, whole: Path) -> None:
    for folder in (*OUT.values(), "metrics"):
        made, expected = (tiny.contents(root / folder) for root in (project, whole))
        assert made == expected, f"{folder} differs"


def killed_run(tmp_path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    # long enough that most kills fall into training
    project = tiny.make_project(tmp_path, config__total_steps=60)
    whole = tmp_path / "whole"
    began = time.monotonic()
    tiny.by_hand(project / RUN_FILE, whole, *STAGES)
    duration = time.monotonic() - began
    engines = cycle(ENGINES if seed % 2 else reversed(ENGINES))
    killed = 0
    while killed < kills:
        moment = chance.uniform(1, duration)
        if kill_after(project, next(engines), moment, chance.random() < 0.5):
            killed += 1
        else:  # it had ended before: there is nothing to kill until all is to be made again
            expect_equal(project, whole)
            tiny.run(project, "git", "clean", "-fdxq")
    tiny.run(project, *ENGINES[next(engines)])
    expect_equal(project, whole)
    runs = project / "data" / "runs"
    assert not [path for path in runs.iterdir() if path.is_dir()], "work in progress is left"


def test_killed_runs_end_with_the_same_bytes(tmp_path):
    killed_run(tmp_path, kills=2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_runs_killed_often_end_with_the_same_bytes(tmp_path, seed):
    killed_run(tmp_path, kills=5, seed=seed)


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Path:
    """A training that was asked to stop: the folder of its run file and its root."""
    folder = tmp_path_factory.mktemp("stopped")
    data = tiny.write_data(folder / "tokens")
    run_file, root = folder / "run.toml", folder / "root"
    tiny.write_run(
        run_file, tiny.run_document(data, config__total_steps=400, runtime__checkpoint_every=1000)
    )
    tiny.make(run_file, root, "download", "convert")
    trainer = tiny.lockstep("train", run_file, root)
    assert any("an audit replays" in line for line in trainer.stdout)  # then it takes rounds
    time.sleep(1)
    trainer.send_signal(signal.SIGTERM)
    trainer.communicate()
    assert trainer.returncode == 143
    return folder


@pytest.fixture
def stopped(training, tmp_path) -> tuple[Path, Path, Path]:
    """Its run file, its root, and its work in progress, all to change."""
    folder = shutil.copytree(training, tmp_path / "stopped")
    run_file, root = folder / "run.toml", folder / "root"
    (work,) = (path for path in (root / "data/runs").iterdir() if path.is_dir())
    return run_file, root, work


def refusal(run_file: Path, root: Path) -> str:
    trainer = tiny.lockstep("train", run_file, root)
    said, _ = trainer.communicate()
    assert trainer.returncode == 1, said
    return said.splitlines()[-1]


def test_a_trainer_asked_to_stop_saves_and_goes_on_where_it_was(stopped):
    run_file, root, _ = stopped
    assert "resumes after round" in tiny.by_hand(run_file, root, "train")


def test_a_run_does_not_go_on_where_its_bits_would_differ(stopped):
    run_file, root, work = stopped
    file = work / "transcript" / "header.json"
    header = json.loads(file.read_text())
    header["environment"]["instruction_set"] = "abacus"
    file.write_text(json.dumps(header))
    said = refusal(run_file, root)
    assert "instruction_set is" in said and "expected 'abacus'" in said


def test_a_run_does_not_go_on_from_a_transcript_that_lost_rounds(stopped):
    run_file, root, work = stopped
    file = work / "transcript" / "rounds.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    assert f"{len(lines) - 1} rounds, expected the {len(lines)} before" in refusal(run_file, root)
