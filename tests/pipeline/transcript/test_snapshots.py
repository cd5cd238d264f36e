"""Snapshots on disk: each peer's own state under its name, and equal ones once."""

import numpy as np

from pipeline.runfile.windows import Snapshots
from pipeline.transcript.state import State
from pipeline.transcript.transcript import Transcript, Writer

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
