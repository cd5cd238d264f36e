"""The params of a run after each round: a list that was written, and those that come out here."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
from pydantic import Field

from lockstep.errors import LockstepError, expecting
from lockstep.files import read_bytes, write_named
from lockstep.protocol.attestation import Hash
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import RunningPeers, make_peers
from lockstep.swarm.swarm import Swarm
from lockstep.swarm.training_loop import Record, TrainingLoop
from lockstep.tables.table import Table
from lockstep.tables.validation import validate_json
from lockstep.transcript.entry import TABLES, Entry
from lockstep.transcript.observer import Observer
from parts.bits.recording import key_of
from pipeline.start.set_up import Setup

MOST_BYTES = 2**24


class RoundHashes(Table):
    """The listed hash of a run's params after each round."""

    key: Hash
    """SHA-256 of what determines them: tables of the run file, and the pin of the data."""
    params: Annotated[tuple[Hash, ...], Field(min_length=1, max_length=2**17)]
    """Hash of the params after each round."""


def _key_of(setup: Setup) -> Hash:
    """Return what a list of the params' hashes after rounds stands for.

    Raises:
      LockstepError: The run goes as compiled: its params have other bits elsewhere.
    """
    if setup.run.peers.bits != "everywhere":
        raise LockstepError(f'[peers] bits = "{setup.run.peers.bits}", expected "everywhere"')
    return key_of(setup, TABLES | {"faults", "pins"})


def write(file: Path, setup: Setup, last: int) -> None:
    """Train a run up to round `last`, and write the hashes of its params."""
    key, hashes = _key_of(setup), list[Hash]()
    _train(setup, last, lambda _, found: hashes.append(found))
    text = RoundHashes(key=key, params=tuple(hashes)).model_dump_json(indent=1)
    write_named(file, f"{text}\n")


def check(file: Path, setup: Setup, most: int | None) -> int:
    """Train a run as far as a list goes, or `most` rounds; return how many have the listed hashes.

    Raises:
      LockstepError: The list is of another run, or a round's params are others here.
    """
    with expecting(file, "a list that `lockstep bits check --write` wrote"):
        listed = validate_json(RoundHashes, read_bytes(file, MOST_BYTES), str(file))
    if (key := _key_of(setup)) != listed.key:
        raise LockstepError(
            f"{file}: key {listed.key[:12]}, expected {key[:12]}: it is of another run file"
        )
    last = min(most or len(listed.params), len(listed.params), setup.run.config.total_steps)

    def compare(step: int, found: Hash) -> None:
        expected = listed.params[step - setup.start.step - 1]
        if found != expected:
            raise LockstepError(
                f"{file}: round {step}: params {found[:12]}, expected {expected[:12]}; "
                "`lockstep bits record` on both machines leads to the operation"
            )

    _train(setup, last, compare)
    return last


class _AfterEach(Observer):
    def __init__(self, peers: RunningPeers, heard: Callable[[int, Hash], None]):
        self.peers, self.heard = peers, heard

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Tell of the params' hash after a round."""
        self.heard(entry.round.step, self.peers.params_hash())


def _train(setup: Setup, last: int, heard: Callable[[int, Hash], None]) -> None:
    """Train a run in this process up to round `last`; tell of each round's params."""
    run, programs = setup.run, setup.programs
    peers = make_peers(programs, run.peers.layout, setup.start.state, jax.devices())
    faults = FaultSchedule(run.faults.schedule, run.peers.seed, programs.form)
    record = Record()
    swarm = Swarm(
        setup.settings, peers, lambda _: setup.data, faults, recorded=record.asked(programs.form)
    )
    start = record.begin(setup.start, setup.settings)
    TrainingLoop(swarm, start, record, last, [_AfterEach(peers, heard)]).take_rounds()
