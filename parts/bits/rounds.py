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


def write(file: Path, setup: Setup, most: int | None) -> int:
    """Train all rounds of a run, or `most`; write the hashes of its params, return how many."""
    key, hashes = _key_of(setup), list[Hash]()
    count = _train(setup, most, lambda _, found: hashes.append(found))
    text = RoundHashes(key=key, params=tuple(hashes)).model_dump_json(indent=1)
    write_named(file, f"{text}\n")
    return count


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

    def compare(step: int, found: Hash) -> None:
        expected = listed.params[step - setup.start.step - 1]
        if found != expected:
            raise LockstepError(
                f"{file}: round {step}: params {found[:12]}, expected {expected[:12]}; "
                "`lockstep bits record` on both machines leads to the operation"
            )

    return _train(setup, min(most or len(listed.params), len(listed.params)), compare)


class _AfterEach(Observer):
    def __init__(self, peers: RunningPeers, heard: Callable[[int, Hash], None]):
        self.peers, self.heard = peers, heard

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Tell of the params' hash after a round."""
        self.heard(entry.round.step, self.peers.params_hash())


def _train(setup: Setup, most: int | None, heard: Callable[[int, Hash], None]) -> int:
    """Train a run in this process, `most` rounds of it; tell of each one's params, count them."""
    run, programs, before = setup.run, setup.programs, setup.start.step
    last = min(run.config.total_steps, before + (most or run.config.total_steps))
    peers = make_peers(programs, run.peers.layout, setup.start.state, jax.devices())
    faults = FaultSchedule(run.faults.schedule, run.peers.seed, programs.form)
    record = Record()
    swarm = Swarm(
        setup.settings, peers, lambda _: setup.data, faults, recorded=record.asked(programs.form)
    )
    start = record.begin(setup.start, setup.settings)
    TrainingLoop(swarm, start, record, last, [_AfterEach(peers, heard)]).take_rounds()
    return last - before
