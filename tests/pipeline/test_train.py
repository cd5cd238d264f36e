"""A training that is paused, stopped and resumed, goes over its data three times, and pushes its
epochs: one for all tests."""

import gzip
import json
import os
import signal
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from jax.profiler import ProfileData

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from pipeline import __main__ as commands
from pipeline.monitor import training
from pipeline.monitor.profile import RoundTimes
from pipeline.monitor.training import Status
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.servers.hub import REPO, Hub, running_hub

pytestmark = pytest.mark.long

ROUNDS, EPOCH, SEQUENCES = 16, 6, 25
OLDER = tomllib.loads((PROJECT / "tests/fixtures/psyche_older_spelling.toml").read_text())


class Trained(NamedTuple):
    """A training, its hub, and what was seen of it.

    Attributes:
      root: where its stages wrote.
      hub: where its epochs went.
      paused, again: its status when it waited, before it was stopped and after.
      said: what it printed from the second start on.
    """

    root: Path
    hub: Hub
    paused: Status
    again: Status
    said: str

    @property
    def transcript(self) -> Transcript:
        return Transcript(self.root / "data" / "trained" / "transcript")


def meanwhile(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until(root: Path, *states: str, after: float = 0.0) -> training.Training:
    """The training below `root`, once it tells of one of these states, after a time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            seen = training.in_progress(root)[0]
        except LockstepError:  # it has not begun
            seen = None
        if seen and seen.state in states and seen.status.updated > after:
            return seen
        time.sleep(0.002)
    raise AssertionError(f"not {states} after a minute")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    root = tmp_path_factory.mktemp("trained")
    config = {"min_clients": 2, "witness_nodes": 1, "verification_percent": 0}
    config |= {"total_steps": ROUNDS, "rounds_per_epoch": EPOCH, "global_batch_size": 4}
    local = {"path": str(tiny.write_data(root / "tokens")), "shuffle": {"Seeded": [7] * 32}}
    document = tiny.run_document(
        root,
        config=OLDER["config"] | config | {"checkpointers": [REPO]},
        model__LLM__data_location={"Local": local},
        download__limit={"tokens": SEQUENCES * 16},
        peers__passes=3,
        export__every_epoch=True,
        runtime__checkpoint_every=1000,
        runtime__sinks=["tensorboard"],
        runtime__profile="14:15",
        witness__snapshot_every=8,
    )
    tiny.write_run(run_file := root / "run.toml", document)
    tiny.make(run_file, root, "download", "convert")
    seen = {}

    def pause_and_stop() -> None:
        until(root, "starting", "training").pause()
        seen["paused"] = until(root, "paused").status
        os.kill(os.getpid(), signal.SIGTERM)

    def resume() -> None:
        seen["again"] = until(root, "paused", after=seen["paused"].updated).status
        commands.resume(root)

    with pytest.MonkeyPatch.context() as patch, running_hub(patch, root / "home") as hub:
        patch.setenv("HF_TOKEN", "hf_sentinel")
        thread = meanwhile(pause_and_stop)
        with pytest.raises(SystemExit) as stopped:
            tiny.make(run_file, root, "train")
        thread.join()
        assert stopped.value.code == 143 and until(root, "stopped")
        thread = meanwhile(resume)
        said = tiny.make(run_file, root, "train")
        thread.join()
        tiny.make(run_file, root, "witness")
    return Trained(root, hub, **seen, said=said)


def test_a_paused_training_waits_outlives_a_stop_and_goes_on_when_resumed(trained):
    pause = trained.paused.round
    assert trained.again.round == pause < ROUNDS
    assert trained.again.held_out_loss == trained.paused.held_out_loss
    assert f"paused after round {pause}" in trained.said and "train: resumed" in trained.said
    entries = trained.transcript.rounds
    assert [entry.round.step for entry in entries] == list(range(1, ROUNDS + 1))
    assert [entry.round.step for entry in entries if entry.paused] == [pause]
    assert {entry.round.joined for entry in entries} == {()}  # all go on with their own states


def test_sinks_have_each_round_of_a_stopped_and_resumed_training_once(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = (trained.root / "data" / "tracked" / "tensorboard").iterdir()
    told = EventAccumulator(str(folder)).Reload()
    losses = {event.step: event.value for event in told.Scalars("loss/train")}
    assert len(told.Scalars("loss/train")) == ROUNDS
    entries = trained.transcript.rounds
    assert losses == pytest.approx({entry.round.step: entry.loss for entry in entries})
    measured = [entry.round.step for entry in entries if entry.held_out_loss is not None]
    assert [event.step for event in told.Scalars("loss/held_out")] == [0, *measured]


def test_a_profile_has_the_trace_of_its_rounds_and_where_their_time_went(trained):
    (folder,) = (trained.root / "data" / "profiles").iterdir()
    assert f"profile of rounds 14 to 15: {folder}" in trained.said
    times = RoundTimes.model_validate_json((folder / "times.json").read_bytes())
    assert (times.first, times.last) == (14, 15)
    assert {"read", "train", "encode", "apply", "transcript", "held out"} <= {*times.phases}
    assert sum(times.phases.values()) == pytest.approx(times.seconds)
    assert times.phases["train"] > times.phases["witness"] > 0
    (perfetto,) = folder.rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(perfetto.read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "train" for event in events) == 2
    (xplane,) = folder.rglob("*.xplane.pb")
    lines = [line for plane in ProfileData.from_file(str(xplane)).planes for line in plane.lines]
    assert {"train", "apply"} <= {event.name for line in lines for event in line.events}


def test_epochs_end_with_params_that_are_recorded_and_pushed_beside_what_is_audited(trained):
    entries, hub = trained.transcript.rounds, trained.hub
    ends = {entry.round.epoch: entry.round.step for entry in entries}
    stored = {entry.round.step: entry.checkpointed for entry in entries if entry.checkpointed}
    assert [*stored] == [*ends.values()] and trained.paused.round in stored and len(stored) > 2
    assert stored[ROUNDS].params == trained.transcript.hashes(ROUNDS).params
    assert [message.split()[1] for message in hub.messages] == [str(step) for step in stored]
    assert all(message.endswith("unaudited") for message in hub.messages)
    assert {*hub.files} == {".gitattributes"}  # of main
    pushed = hub.commits[hub.refs["unaudited"]]
    assert {"README.md", "config.json", "model.safetensors"} <= pushed.keys()
    assert f"# Unaudited: step {ROUNDS} of run".encode() in pushed["README.md"]
    assert hub.private


def test_a_run_that_was_paused_and_went_over_its_data_again_passes_its_audit(trained):
    last = max(b for entry in trained.transcript.rounds for _, b in entry.round.assignment.values())
    assert last == 4 * ROUNDS - 1 > 2 * SEQUENCES
    assert trained.transcript.header.run["peers"]["passes"] == 3
    verdict = read_json(trained.root / "data" / "verdict" / "verdict.json")
    assert verdict["accepted"] and verdict["findings"] == []
