"""Snapshots on disk: each peer's own state under its name, and equal ones once."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep.protocol import consensus, driver
from lockstep.protocol.round import Message
from lockstep.transcript.state import State
from lockstep.transcript.transcript import Transcript, Writer
from lockstep.transcript.windows import Snapshots
from tests.lockstep.protocol import records, three_peers

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
    settings = three_peers.Settings(init_min_clients=3)
    progress = driver.ask(driver.start(settings, 3, 1, 10), range(3))
    writer, synced, sync = Writer(tmp_path, Snapshots(0, 6, 1)), [], os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(3):
        progress, round_ = driver.next_round(progress)
        sent = {peer: Message("ab" * 32, 1, "cd" * 32) for peer in round_.assignment}
        said = records.evidence(sent, arrivals=dict.fromkeys(sent, 1.0))
        said = replace(said, attestations=consensus.witnessed(round_, said, 30))
        progress, decision = driver.finish_round(progress, round_, said)
        synced.clear()
        writer.round(records.entry(round_, said, decision), dict.fromkeys(sent, b"xy"))
        writer.flush()
        names = [path.name for path in synced if path.parent.name == "payloads"]
        assert names == [f"{round_.step:05}.bin"]
