"""Which snapshots a run takes, and the windows between those that are kept whole."""

import os
from pathlib import Path

import numpy as np
import pytest

from lockstep.transcript.state import State
from lockstep.transcript.transcript import Transcript, Writer
from lockstep.transcript.windows import Snapshots, Window
from tests.lockstep.transcript.test_curves import entry


@pytest.mark.parametrize(
    ("snapshots", "steps", "kept"),
    [
        (Snapshots(0, 200, 50), [0, 50, 100, 150, 200], [0, 50, 100, 150, 200]),
        (Snapshots(0, 200, 50, 2), [0, 50, 100, 150, 200], [0, 100, 200]),
        (Snapshots(0, 199, 50, 3), [0, 50, 100, 150, 199], [0, 150, 199]),
        (Snapshots(0, 6, 50, 2), [0, 6], [0, 6]),
        # a run that extends another counts from the snapshot that it starts with
        (Snapshots(60, 200, 50, 2), [60, 100, 150, 200], [60, 150, 200]),
        (Snapshots(50, 200, 50, 2), [50, 100, 150, 200], [50, 150, 200]),
    ],
)
def test_windows_lie_between_the_snapshots_that_are_kept_whole(snapshots, steps, kept):
    assert (snapshots.steps, snapshots.kept) == (steps, kept)
    windows = snapshots.windows
    assert [window.opening for window in windows] == kept[:-1]
    assert [window.last for window in windows] == kept[1:]
    assert snapshots.window_count == len(windows)
    openings = range(-1, snapshots.end + 2)
    assert [step for step in openings if snapshots.takes(step)] == steps
    assert [step for step in openings if snapshots.keeps(step)] == kept
    assert [w for w in map(snapshots.window_after, openings) if w is not None] == windows
    rounds = [step for window in windows for step in window.rounds]
    assert rounds == list(range(snapshots.start + 1, snapshots.end + 1))


def test_nothing_is_listed_to_ask_about_one_step_of_an_endless_run():
    endless = Snapshots(0, 2**40, 1)
    assert endless.window_count == 2**40
    assert endless.takes(2**39) and endless.keeps(2**39)
    assert endless.window_after(2**39) == Window(2**39 + 1, 2**39 + 1)
    assert Window(1, 2**40).rounds[-1] == 2**40


def test_payload_files_begin_after_each_snapshot():
    first = Snapshots(60, 200, 50, 2).first_round_of_payloads
    assert [first(step) for step in (61, 100, 101, 150, 151, 200)] == [61, 61, 101, 101, 151, 151]


# ---- Snapshots on disk: each peer's own state under its name, and equal ones once ----


ZEROS, ONES = ({"delta": np.full(1000, value, np.float32)} for value in (0.0, 1.0))
PARAMS = {"w": np.zeros(3, np.float32)}


def test_equal_states_are_one_file_and_a_later_write_changes_no_other_peers(tmp_path):
    writer = Writer(tmp_path, Snapshots(0, 4, 2))
    transcript, folder = Transcript(tmp_path), tmp_path / "snapshots" / "00000"

    def write(*own: dict) -> list[float]:
        """Write the snapshot, and return what each peer's file then holds."""
        writer.snapshot(0, State(PARAMS, {}, own))
        return [float(transcript.own(0, n, ZEROS)["delta"].mean()) for n in range(len(own))]

    def files() -> int:
        return len({path.stat().st_ino for path in folder.glob("own-*")})

    assert write(ZEROS, ZEROS, ONES, ZEROS) == [0, 0, 1, 0] and files() == 2
    assert write(ONES, ZEROS, ONES, ZEROS) == [1, 0, 1, 0] and files() == 2  # after a kill
    assert write(ZEROS, ONES, ONES, ZEROS) == [0, 1, 1, 0] and files() == 2
    assert transcript.hashes(0).own[0] == transcript.hashes(0).own[3]


def test_a_checkpoint_syncs_the_payloads_that_were_written_since_the_last_and_no_others(
    tmp_path, monkeypatch
):
    writer, synced, sync = Writer(tmp_path, Snapshots(0, 6, 1)), [], os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    for step in range(1, 4):
        synced.clear()
        writer.round(entry(step, {0: 2, 1: 2}, 2, None), dict.fromkeys(range(2), b"xy"))
        writer.flush()
        names = [path.name for path in synced if path.parent.name == "payloads"]
        assert names == [f"{step:05}.bin"]
