"""A run in a store: it is opened, taken part in, and followed."""

import shutil
from pathlib import Path
from typing import NamedTuple

import jax

from lockstep.errors import LockstepError, RequestError
from lockstep.files import write_named
from lockstep.machine import allocator
from lockstep.machine.progress import size
from lockstep.swarm.checkpoints import Checkpoints
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import make_peers
from lockstep.swarm.swarm import NotFiniteError
from lockstep.swarm.training_loop import Record, TrainingLoop
from lockstep.transcript.entry import TABLES, Header
from lockstep.transcript.transcript import Transcript, Writer
from parts.volunteers import keys, layout, planted
from parts.volunteers.bodies import RunDocument
from parts.volunteers.chain import statements
from parts.volunteers.chain.act import End
from parts.volunteers.chain.chain import Chain
from parts.volunteers.keys import PublicKey
from parts.volunteers.lab import opening
from parts.volunteers.store.probe import probe
from parts.volunteers.store.schemes import open_store
from parts.volunteers.stored_run import stored_run
from parts.volunteers.training.process import Onlooker
from pipeline import runfile
from pipeline.command_options import MOST_GB
from pipeline.language_model import cudnn
from pipeline.net import limits
from pipeline.net.limits import FetchLimit, NetSettings
from pipeline.run_stage import run_stage
from pipeline.runfile import Runtime, as_text, strangers
from pipeline.runfile.strangers_values import Use
from pipeline.stage import devices, lock, logs
from pipeline.stage.artifacts import Paths
from pipeline.start import set_up
from pipeline.start.set_up import Setup, repeats_bit_for_bit


class FollowedRun(NamedTuple):
    """A run that was followed to its last round, or to where its links end."""

    setup: Setup
    transcript: Transcript
    chain: Chain
    end: End | None  #: Where its links end; None where all rounds are over.


def follow_rounds(setup: Setup, folder: Path, key: str, onlooker: Onlooker) -> FollowedRun:
    """Follow a run in the store of its run file, and write its transcript below a folder.

    Cut off, it goes on where it was; a run that was followed to its end is followed anew. `key` is
    that of the run's stage train.

    Raises:
      LockstepError: The run diverged, or its store has another one.
    """
    run, stored = setup.run, stored_run(setup, onlooker)
    start, snapshots = stored.start, run.snapshots(stored.start.step)
    chain = stored.process.chain
    checkpoints = Checkpoints(folder / "checkpoints", run.runtime.keep_steps)
    saved = checkpoints.newest(start.state)
    if saved is None:  # as after its end
        shutil.rmtree(folder / "transcript", ignore_errors=True)
    writer = Writer(folder / "transcript", snapshots)
    record = Record(writer, checkpoints, run.runtime.checkpoint_every)
    beginning = record.begin(start, setup.settings, saved)
    programs, absent = setup.programs, beginning.absent
    peers = make_peers(programs, run.peers.layout, beginning.state, jax.devices(), absent)
    if saved is None:
        writer.header(_header(setup, key))
        writer.snapshot(start.step, setup.start.state)
    beginning = stored.begin(beginning, peers, writer)
    faults = FaultSchedule(run.faults.schedule, run.peers.seed, programs.form)
    swarm = stored.swarm(setup.settings, peers, lambda _: setup.data, faults, spool=folder)
    with checkpoints:
        try:
            last = run.config.total_steps
            TrainingLoop(swarm, beginning, record, last, stored.observers).take_rounds()
        except NotFiniteError as error:
            raise LockstepError(f"{chain.store.address}: diverged: {error}") from error
    if swarm.end is None:
        shutil.rmtree(checkpoints.folder)
    transcript = Transcript(folder / "transcript")
    return FollowedRun(setup, transcript, chain, swarm.end)


def _header(setup: Setup, key: str) -> Header:
    """Return the header of a followed run's transcript, in which nothing is measured."""
    return Header(
        key=key,
        run=setup.run.model_dump(mode="json", include=TABLES),
        model=setup.model,
        environment=setup.environment(setup.run.peers.processes),
        bitwise=repeats_bit_for_bit(setup),
        held_out_loss=None,
    )


STAGES = "download", "convert", "train"
MAY_BE_LARGE = "where a run's data and checkpoint may be that large, say so with --max-gb"
PATIENCE = NetSettings(attempts=3, stall_seconds=10.0)  # until a run's document is read


def open_run(address: str, run_file: Path, root: Path, key_file: Path, seal: Path | None) -> None:
    """Open the run of a run file in a store, which is tried first; slots may lie by a `seal`."""
    run, paths, key = runfile.load(run_file), Paths("train", run_file, root), keys.read(key_file)
    if run.links.clock != "store":
        raise LockstepError(
            f'{run_file}: links.clock is "{run.links.clock}", expected "store" for volunteers'
        )
    strangers.check(run, str(run_file), Use.JOINED)  # or nobody could join
    store = open_store(address, run.runtime)
    probe(store)
    devices.prepare(run)
    setup = set_up.read(run, paths.need("convert"), paths.need("download"))
    document = opening.open_run(store, setup, key, seal and planted.read(seal)[2])
    print(f"open: {address}: {document.slots} slots, {size(document.payload_bytes)} a message")


def join(address: str, root: Path, key_file: Path, max_gb: int, *, from_state: bool) -> None:
    """Join a run, up to its last round.

    Its data and checkpoint may have `max_gb` 10^9 bytes together. With `from_state` it begins after
    the newest state in the store.
    """
    allocator.tune()  # which begins anew
    keys.read(key_file)  # before anything is fetched
    key = str(key_file.absolute())
    own = Runtime(store=address, volunteer_key=key, from_state=from_state)
    with limits.logging_attempts():
        document, _, _ = statements.read_run(open_store(address, PATIENCE))
        run, run_file = _write_run(document, address, root, Use.JOINED, own)
    others = run.peers.count - 1
    print(
        f"join: {run.config.total_steps} rounds; in each, {size(document.payload_bytes)} up and "
        f"{size(others * document.payload_bytes)} down"
    )
    with FetchLimit(max_gb * 10**9, MAY_BE_LARGE):
        for stage in STAGES:
            run_stage(stage, run_file, root)


def follow(
    address: str,
    root: Path,
    onlooker: Onlooker,
    network: NetSettings = PATIENCE,
    lab: PublicKey | None = None,
    max_gb: int = MOST_GB,
) -> FollowedRun:
    """Follow a run, which the reader's `lab` has opened, in a folder of its own below `root`.

    Its data and checkpoint may have `max_gb` 10^9 bytes together.
    """
    document, sha256, _ = statements.read_run(open_store(address, network), lab)
    root = root / "data" / "followed" / sha256[:16]
    own = Runtime(store=address, attempts=network.attempts, stall_seconds=network.stall_seconds)
    run, run_file = _write_run(document, address, root, Use.FOLLOWED, own)
    with FetchLimit(max_gb * 10**9, MAY_BE_LARGE):
        for stage in STAGES[:-1]:
            run_stage(stage, run_file, root)
    paths = Paths("train", run_file, root)
    logs.to_stdout(run.runtime.log_level.upper())
    devices.prepare(run)
    devices.keep_compiled(paths.store / "compiled")
    allocator.trim_after_compiling()
    setup = set_up.read_to_train(run, paths.need("convert"), paths.need("download"))
    cudnn.check(run, setup.model)
    with lock.hold(paths.runs / f"{paths.key}.lock"):
        paths.match_scratch()
        followed = follow_rounds(setup, paths.scratch, paths.key, onlooker)
    if followed.chain.run != sha256:  # it was read more than once
        raise LockstepError(f"{address}/{layout.RUN}: changed while it was read, expected one run")
    return followed


def _write_run(
    document: RunDocument, address: str, root: Path, use: Use, runtime: Runtime
) -> tuple[runfile.Run, Path]:
    """Write the run file of a run in a store, as it runs here for who joins."""
    if document.release != (ours := opening.release()):
        raise RequestError(f"{address}: was opened by release {document.release}, expected {ours}")
    run = strangers.read(document.run, f"{address}/run.json", use, runtime)
    run_file = root / "data" / "run.toml"  # root is the reader's, who may have one there
    run_file.parent.mkdir(parents=True, exist_ok=True)
    write_named(run_file, as_text.run_file(run, "Of a run in a store."))
    return run, run_file
