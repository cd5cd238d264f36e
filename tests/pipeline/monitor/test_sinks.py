"""The curves of a run in TensorBoard and W&B, each read as its own tools read them."""

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest
import tomlkit

from lockstep.transcript.curves import Totals
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.monitor import tracker
from pipeline.monitor.sinks import TensorBoardSink, TrackedRun, _last_step
from pipeline.monitor.tracker import Tracker
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.errors import check_names, refused
from tests.pipeline.finished_run import PEERS, ROUNDS, finish

pytestmark = pytest.mark.long

SAVED, KILLED = 15, 25
KILL = """
import os, signal, sys, time
from pathlib import Path
from pipeline import runfile
from pipeline.monitor.tracker import Tracker
from lockstep.transcript.transcript import Transcript

run, folder, trained, rounds = sys.argv[1:]
scores = []
with Tracker(runfile.load(Path(run)), Path(folder), 0, lambda: scores) as tracker:
    for entry in Transcript(Path(trained) / "transcript").rounds[:int(rounds)]:
        step = entry.round.step
        if step % 10 == 0:
            scores.append((step, "next_line", "acc", step / 100, 0.0, 1.0))
        tracker.took(entry, {"rounds_per_second": 1.0})
    while not all(feed._queue.empty() for feed in tracker._feeds):
        assert all(feed._thread.is_alive() for feed in tracker._feeds)  # one said why it ended
        time.sleep(0.01)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
"""
HANG = """
import os, signal, sys, time
from pathlib import Path
import wandb
from pipeline import runfile
from pipeline.monitor import tracker

run, trained, folder = sys.argv[1:]
tracker.PATIENCE_SECONDS = 1.0
with tracker.Tracker(runfile.load(Path(run)), Path(trained), 1) as told:
    while told._feeds[0]._queue.qsize():
        time.sleep(0.01)
    service = wandb.setup()._connection._proc._process.pid
    Path(folder, "service").write_text(str(service))
    os.kill(service, signal.SIGSTOP)
"""
Curves = dict[str, list[tuple[int, float]]]


class Tracked(NamedTuple):
    """A run that told its sinks, was killed after `KILLED` rounds and resumed after `SAVED`."""

    run_file: Path  #: Its run file.
    trained: Path  #: What its stage train left.
    key: str  #: Of its stage train.
    folder: Path  #: What the sinks wrote.

    @property
    def name(self) -> str:
        """What all trackers call it."""
        return f"distro-1.9M-{self.key}"

    @property
    def transcript(self) -> Transcript:
        return Transcript(self.trained / "transcript")


def name_sinks(run_file: Path, folder: Path, names: Collection[str]) -> runfile.Run:
    document = tomlkit.parse(run_file.read_text())
    document["runtime"] |= {"sinks": [*names], "sink_dir": str(folder)}
    run_file.write_text(tomlkit.dumps(document))
    return runfile.load(run_file)


def cut(trained: Path, folder: Path, step: int) -> None:
    """Leaves of a transcript what a training has when it goes on after a step."""
    (folder / "transcript").mkdir(parents=True, exist_ok=True)
    shutil.copy(trained / "transcript" / "header.json", folder / "transcript")
    lines = (trained / "transcript" / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "transcript" / "rounds.jsonl").write_text("".join(lines[:step]))


def scored(step: int) -> tuple:
    """A line of metrics/tasks.tsv."""
    return step, "next_line", "acc", step / 100, 0.0, 1.0


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Tracked:
    root = tmp_path_factory.mktemp("tracked")
    run_file = finish(root)
    name_sinks(run_file, seen := root / "seen", ["tensorboard", "wandb"])
    paths = Paths("train", run_file, root)
    found = Tracked(run_file, paths.out("train"), paths.key, seen)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        cut(found.trained, paths.scratch, 0)
        killed = tiny.python("-c", KILL, run_file, paths.scratch, found.trained, KILLED)
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        cut(found.trained, paths.scratch, SAVED)
        run = name_sinks(run_file, seen, READERS)
        scores = [scored(10)]
        with Tracker(run, paths.scratch, SAVED, lambda: scores) as tracker:
            for entry in found.transcript.rounds[SAVED:]:
                if entry.round.step % 10 == 0:
                    scores.append(scored(entry.round.step))
                tracker.took(entry, {"rounds_per_second": 2.0})
    return found


def of_tensorboard(tracked: Tracked) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (tracked.folder / "tensorboard").iterdir()
    assert folder.name == tracked.name and len(list(folder.iterdir())) == 2
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    return {name: [(e.step, e.value) for e in points] for name, points in scalars.items()}


def of_wandb(tracked: Tracked) -> Curves:
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    (file,) = tracked.folder.glob("wandb/offline-run-*/*.wandb")  # one run to upload
    assert file.name == f"run-{tracked.key}.wandb"
    store, curves = DataStore(), defaultdict(list)
    store.open_for_scan(str(file))
    while data := store.scan_data():
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "run":
            assert record.run.display_name == tracked.name
        if record.WhichOneof("record_type") == "history":
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_"):
                    curves[name].append((record.history.step.num, float(item.value_json)))
    return curves


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_killed_and_resumed_run_is_one_run_with_each_round_once(
    read: Callable[[Tracked], Curves], tracked
):
    totals = Totals(runfile.load(tracked.run_file).llm.max_seq_len, PEERS)
    rows = [totals.row(entry) for entry in tracked.transcript.rounds]
    curves = {name: sorted(points) for name, points in read(tracked).items()}
    assert [step for step, _ in curves["loss/train"]] == [row["step"] for row in rows]
    columns = {"loss/train": "loss", "data/tokens": "tokens", "bytes/up": "bytes_up"}
    for name, column in columns.items():
        assert [value for _, value in curves[name]] == pytest.approx([row[column] for row in rows])
    steps, losses = zip(*curves["loss/held_out"], strict=True)
    assert steps == (0, 10, 20, 30, 40)
    before = tracked.transcript.header.held_out_loss
    measured = [row["held_out_loss"] for row in rows if row["held_out_loss"] is not None]
    assert losses == pytest.approx([before, *measured])
    perplexities = [value for _, value in curves["loss/perplexity"]]
    assert perplexities == pytest.approx([math.exp(loss) for loss in losses])
    assert [step for step, late in curves["peers/late"] if late] == [5]
    assert curves["optimizer/learning_rate"][0][1] > 0
    told = {10: 0.1, 20: 0.2, 30: 0.3, 40: 0.4}
    assert curves["tasks/next_line/acc"] == [*map(pytest.approx, told.items())]
    # no transcript has speeds: W&B's new folder is without those of the first start
    first = SAVED + 1 if read is of_wandb else 1
    assert [step for step, _ in curves["speed/rounds_per_second"]] == [*range(first, ROUNDS + 1)]


def test_all_trackers_have_the_same_names(tracked):
    tensorboard, wandb = ({*read(tracked)} for read in READERS.values())
    assert tensorboard == wandb


def test_a_sink_that_fails_is_one_line_and_the_others_go_on(tracked, tmp_path, monkeypatch, caplog):
    """TensorBoard's folder is a file, and W&B is broken off."""
    (tmp_path / "tensorboard").write_text("")
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    run_file = Path(shutil.copy(tracked.run_file, tmp_path))
    run = name_sinks(run_file, tmp_path, READERS)
    with caplog.at_level(logging.WARNING), Tracker(run, tracked.trained, ROUNDS):
        pass
    lines = sorted(
        record.getMessage() for record in caplog.records if "sink" in record.getMessage()
    )
    assert [line.split(":")[2].split()[-1] for line in lines] == sorted(READERS), lines
    assert all(line.endswith("training goes on without it") for line in lines)


def test_a_slow_sink_is_waited_for_until_it_hangs_and_a_line_says_what_it_has(
    tmp_path, monkeypatch, caplog
):
    go = SimpleQueue()

    class SlowSink(TensorBoardSink):
        def log(self, *given):
            go.get()
            super().log(*given)

    def join(seconds):  # while the trainer waits once, the sink takes a round, but not the last
        if (left := feed._queue.qsize()) > 1:
            go.put(None)
            while feed._queue.qsize() == left:
                time.sleep(0.01)

    monkeypatch.setitem(tracker.SINKS, "tensorboard", SlowSink)
    feed = tracker._Feed("tensorboard", TrackedRun("a", "a", "a", tmp_path, {}, 0), [])
    monkeypatch.setattr(feed._thread, "join", join)
    for step in range(1, 11):
        feed.put(step, {"a": 1.0})
    feed.end(finished=True)
    while feed._queue.qsize() > 10:  # the first round is not taken
        time.sleep(0.01)
    feed.wait()
    assert _last_step([*tmp_path.glob("tensorboard/a/*")]) == 9
    check_names(caplog.records[-1].getMessage(), "sink tensorboard", "1 steps left")


def test_a_process_of_wandb_that_never_answers_does_not_keep_a_training(tracked, tmp_path):
    run_file = Path(shutil.copy(tracked.run_file, tmp_path))
    name_sinks(run_file, tmp_path, ["wandb"])
    command = [sys.executable, "-c", HANG, run_file, tracked.trained, tmp_path]
    try:
        done = subprocess.run(command, cwd=PROJECT, stderr=subprocess.DEVNULL, timeout=90)
    finally:
        os.kill(int((tmp_path / "service").read_text()), signal.SIGKILL)
    assert done.returncode == 0


def test_a_sink_without_its_package_is_refused_with_the_extra(tracked, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refused("[runtime] sinks", "wandb", "[sinks]"):
        tracker.check(runfile.load(tracked.run_file))
