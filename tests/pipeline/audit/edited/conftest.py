"""Two trained runs for all tests of edited transcripts: a plain one, and an eventful one."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from lockstep.transcript.transcript import Transcript
from tests import tiny
from tests.lockstep.swarm.simulated import BY_TIME, lab, run_of
from tests.pipeline.audit.edited.audited_run import WHERE, Audited, flat


@pytest.fixture(scope="session")
def audited(tmp_path_factory) -> Audited:
    """An honest run of 8 rounds, snapshots after 0, 4 and 8."""
    run = run_of("signs", verified=True)
    make = partial(lab("signs").train, run)
    return Audited(run, tiny.in_common(tmp_path_factory, "audited", make))


@pytest.fixture(scope="session")
def eventful(tmp_path_factory) -> Audited:
    """A run in which there is something in every field of a round, in one round or another."""
    faults = [
        {"kind": "late", "peer": 2, "rounds": [1, 1]},
        {"kind": "sign_flip", "peer": 4, "rounds": [2, 12]},
        {"kind": "equivocation", "peer": 1, "rounds": [3, 12]},
        {"kind": "crash", "peer": 3, "rounds": [4, 5]},
    ]
    times = {**BY_TIME, "witness_nodes": 0, "total_steps": 12}
    run = run_of("signs", *faults, verified=True, **times)
    folder = tiny.in_common(tmp_path_factory, "eventful", partial(lab("signs").train, run))
    entries = Transcript(folder).rounds
    for name, there in WHERE.items():
        assert any(there(flat(entry.model_dump(mode="json"))) for entry in entries), name
    return Audited(run, folder)


@pytest.fixture
def transcript(audited, tmp_path) -> Path:
    """A copy to tamper with."""
    return shutil.copytree(audited.folder, tmp_path / "transcript")
