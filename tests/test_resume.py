"""Killed at any moment and started again by either engine, a run ends with the same bytes."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from lockstep.files import read_json
from lockstep.transcript.trees import load_arrays
from pipeline.audit.replay import Replay
from pipeline.stage.keys import OUT, RUN_FILE, STAGES
from tests import tiny
from tests.errors import refused

pytestmark = pytest.mark.long

ENGINES = {"dvc": ("dvc", "repro", "-q"), "snakemake": ("snakemake", "-q", "all")}


def kill_when(project: Path, engine: str, come: Callable[[], bool], only_the_engine: bool) -> bool:
    """Starts an engine and kills it, or all it started, at its moment; whether it still ran."""
    output = project.parent / "engine.txt"
    with open(output, "wb") as file:
        process = subprocess.Popen(
            ENGINES[engine],
            cwd=project,
            env=tiny.environment(project),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while not come() and process.poll() is None:
        time.sleep(0.01)
    running = process.poll() is None
    if running:
        (os.kill if only_the_engine else os.killpg)(process.pid, signal.SIGKILL)
    status = process.wait()
    assert running or status == 0, output.read_text()[-3000:]
    return running


def rounds_of(root: Path) -> int:
    """How many rounds the training in progress has taken."""
    return sum(
        file.read_bytes().count(b"\n")
        for file in (root / "data" / "runs").glob("*/transcript/rounds.jsonl")
    )


def expect_equal(project: Path, whole: Path) -> None:
    for folder in (*OUT.values(), "metrics"):
        made, expected = (tiny.contents(root / folder) for root in (project, whole))
        assert made == expected, f"{folder} differs"


def expect_nothing_in_progress(project: Path) -> None:
    runs = project / "data" / "runs"
    assert not [path for path in runs.iterdir() if path.is_dir()], "work in progress is left"


def test_a_run_killed_while_it_trains_and_while_it_is_replayed_ends_with_the_same_bytes(tmp_path):
    project, whole = tiny.make_project(tmp_path, config__total_steps=30), tmp_path / "whole"
    audited = ("download", "convert", "train", "witness")
    tiny.make(project / RUN_FILE, whole, *audited)
    half_saved = "data/runs/*/checkpoints/*tmp*"
    moments = {
        "dvc": lambda: rounds_of(project) >= 10 and any(project.glob(half_saved)),
        "snakemake": lambda: (project / OUT["train"]).exists(),
    }
    for engine, come in moments.items():
        assert kill_when(project, engine, come, only_the_engine=engine == "snakemake")
    tiny.make(project / RUN_FILE, project, *audited)
    expect_equal(project, whole)
    expect_nothing_in_progress(project)


class Killed(BaseException):
    """What stands for a kill: it passes by all that cleans up."""


def kill_at_write(stage: str, run_file: Path, root: Path, file: str) -> None:
    """Runs a stage in this process, and ends it when the bytes of `file` are about to be there."""

    def fsync(descriptor: int) -> None:
        if fnmatch(os.readlink(f"/proc/self/fd/{descriptor}"), f"*/{file}.part"):
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "fsync", fsync)
        tiny.make(run_file, root, stage)


# Files of each stage, in the order of their writes; the made file is the last of each.
WRITES = {
    "download": (".shards.json", ".made-*.json"),
    "convert": (".params.safetensors", ".made-*.json"),
    "train": (
        ".header.json", "00000/.params.safetensors", "00003/.own-001.safetensors",
        "00006/.state.json", ".final.json", ".made-*.json", "metrics/.train.json"),
    "witness": ("windows/.*.json", ".verdict.json", ".made-*.json", "metrics/.witness.json"),
    "export": (".model.safetensors", ".made-*.json"),
    "evaluate": (".evaluate.json", ".made-*.json"),
    "report": (".made-*.json",),
}  # fmt: skip


def test_a_run_killed_at_a_write_of_each_kind_ends_with_the_same_bytes(tmp_path):
    run_file, _ = tiny.start(tmp_path)
    project, whole = tmp_path / "project", tmp_path / "whole"
    tiny.make(run_file, whole)

    for stage, files in WRITES.items():
        for file in files:
            kill_at_write(stage, run_file, project, file)
        tiny.make(run_file, project, stage)
    expect_equal(project, whole)
    expect_nothing_in_progress(project)


def test_local_steps_killed_between_exchanges_end_with_the_same_bytes_and_pass_the_audit(tmp_path):
    """A peer's inner optimizer is in checkpoints, snapshots and windows; messages are not kept."""
    run_file, _ = tiny.start(tmp_path, model__LLM__optimizer=tiny.STREAMING)
    project, whole = tmp_path / "project", tmp_path / "whole"
    stages = ("download", "convert", "train", "witness")
    tiny.make(run_file, whole, *stages)
    tiny.make(run_file, project, *stages[:2])
    kill_at_write("train", run_file, project, "00003/.own-001.safetensors")
    kill_at_write("train", run_file, project, "00006/.own-001.safetensors")
    tiny.make(run_file, project, *stages[2:])
    made, expected = (tiny.contents(root / "data/trained") for root in (project, whole))
    assert made == expected
    sent = tiny.sent(project / "data/trained/transcript")
    assert sent and {message["payload"] for message in sent} == {None}
    own = load_arrays(project / "data/trained/transcript/snapshots/00003/own-000.safetensors")
    assert any(name.startswith("inner_shared/") and array.any() for name, array in own.items())
    assert read_json(project / "data/verdict/verdict.json")["accepted"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_runs_killed_often_end_with_the_same_bytes(tmp_path, seed):
    chance = random.Random(seed)
    # long enough that most kills fall into training
    project = tiny.make_project(tmp_path, config__total_steps=60)
    whole = tmp_path / "whole"
    began = time.monotonic()
    tiny.by_hand(project / RUN_FILE, whole, *STAGES)
    duration = time.monotonic() - began
    engines = cycle(ENGINES if seed % 2 else reversed(ENGINES))
    killed = 0
    while killed < 5:
        late = time.monotonic() + chance.uniform(1, duration)
        come = lambda late=late: time.monotonic() >= late  # noqa: E731
        if kill_when(project, next(engines), come, chance.random() < 0.5):
            killed += 1
        else:  # it had ended before: there is nothing to kill until all is to be made again
            expect_equal(project, whole)
            tiny.run(project, "git", "clean", "-fdxq")
    tiny.run(project, *ENGINES[next(engines)])
    expect_equal(project, whole)
    expect_nothing_in_progress(project)


@pytest.fixture
def stopped(tmp_path) -> tuple[Path, Path, Path]:
    """A killed training: its run file, its root, and its work in progress, all to change."""
    run_file, root = tiny.start(tmp_path)
    tiny.make(run_file, root, "download", "convert")
    kill_at_write("train", run_file, root, "00006/.state.json")
    (work,) = (path for path in (root / "data/runs").iterdir() if path.is_dir())
    return run_file, root, work


def test_a_run_does_not_go_on_where_its_bits_would_differ(stopped):
    run_file, root, work = stopped
    file = work / "transcript" / "header.json"
    header = json.loads(file.read_text())
    header["environment"]["instruction_set"] = "abacus"
    file.write_text(json.dumps(header))
    with refused("instruction_set", "'abacus'"):
        tiny.make(run_file, root, "train")


def test_a_run_does_not_go_on_from_a_transcript_that_lost_rounds(stopped):
    run_file, root, work = stopped
    file = work / "transcript" / "rounds.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    with refused(file, "1 rounds"):
        tiny.make(run_file, root, "train")


def test_work_on_other_data_is_begun_anew(tmp_path, monkeypatch):
    """What lies outside without a pin is in no key."""
    run_file, root = tiny.start(tmp_path)
    replayed, window = [], Replay.window

    def counted(self: Replay, steps, *rest) -> list:
        replayed.append(steps.first)
        return window(self, steps, *rest)

    def change_data() -> None:
        file = tmp_path / "tokens" / "a.ds"
        file.write_bytes(np.fromfile(file, "<u2")[::-1].tobytes())
        shutil.rmtree(root / OUT["download"])
        tiny.make(run_file, root, "download")

    tiny.make(run_file, root, "download", "convert")
    kill_at_write("train", run_file, root, "00006/.state.json")
    change_data()
    tiny.make(run_file, whole := tmp_path / "whole", "download", "convert", "train")
    output = tiny.make(run_file, root, "train")
    assert tiny.contents(root / OUT["train"]) == tiny.contents(whole / OUT["train"])
    assert OUT["download"] in output and "resumes after round" not in output

    kill_at_write("witness", run_file, root, ".verdict.json")
    monkeypatch.setattr(Replay, "window", counted)
    kill_at_write("witness", run_file, root, ".verdict.json")
    assert not replayed
    change_data()
    tiny.make(run_file, root, "train", "witness")
    assert replayed
