"""What the commands do: open a run in a store, and take part in one, and follow one."""

import shutil
from pathlib import Path

from lockstep.errors import LockstepError, RequestError
from lockstep.files import write_named
from lockstep.machine.progress import size
from lockstep.transcript.transcript import Transcript
from parts.volunteers import keys, slots, stored_run
from parts.volunteers.chain import opening
from parts.volunteers.chain.place import CaughtUp, Onlooker, RunInStore
from parts.volunteers.keys import PublicKey
from parts.volunteers.store.probe import probe
from parts.volunteers.store.schemes import open_store
from pipeline import runfile
from pipeline.command_options import run_stage
from pipeline.net import limits
from pipeline.net.limits import NetSettings
from pipeline.runfile import Runtime, as_text, strangers
from pipeline.runfile.answers import Use
from pipeline.stage import devices
from pipeline.stage.artifacts import Paths
from pipeline.start import begin
from pipeline.start.begin import Setup

STAGES = "download", "convert", "train"
PATIENCE = NetSettings(attempts=3, stall_seconds=10.0)  # of who asks for a run at first


def open_run(address: str, run_file: Path, root: Path, key_file: Path) -> None:
    """Open the run of a run file in a store, whose rights and conditions are tried first."""
    run, paths, key = runfile.load(run_file), Paths("train", run_file, root), keys.read(key_file)
    if run.links.clock != "store":
        raise LockstepError(
            f'{run_file}: links.clock is "{run.links.clock}", expected "store" for volunteers'
        )
    strangers.check(run, str(run_file), Use.JOINED)  # or nobody could join
    store = open_store(address, run.runtime)
    probe(store)
    devices.prepare(run)
    setup = begin.read(run, paths.need("convert"), paths.need("download"))
    document = opening.open_run(store, setup, key)
    print(f"open: {address}: {document.slots} slots, {size(document.payload_bytes)} a message")


def join(address: str, root: Path, key_file: Path, *, from_state: bool) -> None:
    """Take part in a run, up to its last round.

    With `from_state` it begins after the newest state in the store.
    """
    keys.read(key_file)  # before anything is fetched
    key = str(key_file.absolute())
    own = Runtime(store=address, volunteer_key=key, from_state=from_state)
    with limits.logging_attempts():
        run, run_file = _fetch_run(address, root, Use.JOINED, own, PATIENCE)
        document, _, _ = opening.read_run(open_store(address, PATIENCE))
    others = run.peers.count - 1
    print(
        f"join: {run.config.total_steps} rounds; in each, {size(document.payload_bytes)} up and "
        f"{size(others * document.payload_bytes)} down"
    )
    for stage in STAGES:
        run_stage(stage, run_file, root)


def follow(
    address: str,
    root: Path,
    watch: Onlooker,
    network: NetSettings = PATIENCE,
    lab: PublicKey | None = None,
) -> tuple[Setup, Transcript, RunInStore]:
    """Follow a run, which the reader's `lab` has opened, in a folder of its own below `root`.

    Cut off, it goes on where it was; a run that was followed to its end is followed anew.
    """
    _, sha256, _ = opening.read_run(open_store(address, network), lab)
    root = root / "data" / "followed" / sha256[:16]
    own = Runtime(store=address, attempts=network.attempts, stall_seconds=network.stall_seconds)
    run, run_file = _fetch_run(address, root, Use.FOLLOWED, own, network)
    paths = Paths("train", run_file, root)
    shutil.rmtree(paths.out("train"), ignore_errors=True)
    token = stored_run.WATCH.set(watch)
    try:
        for stage in STAGES:
            run_stage(stage, run_file, root)
    except CaughtUp:
        pass
    finally:
        stored_run.WATCH.reset(token)
    if watch.place is None or watch.place.run != sha256:  # it was read more than once
        raise LockstepError(f"{address}/{slots.RUN}: changed while it was read, expected one run")
    setup = begin.read(run, paths.out("convert"), paths.out("download"))
    folder = paths.scratch if paths.scratch.exists() else paths.out("train")
    return setup, Transcript(folder / "transcript"), watch.place


def _fetch_run(
    address: str, root: Path, use: Use, runtime: Runtime, network: NetSettings
) -> tuple[runfile.Run, Path]:
    """Write the run file of a run in a store, as it runs here."""
    document, _, _ = opening.read_run(open_store(address, network))
    if document.release != (ours := opening.release()):
        raise RequestError(f"{address}: was opened by release {document.release}, expected {ours}")
    run = strangers.read(document.run, f"{address}/run.json", use, runtime)
    run_file = root / "data" / "run.toml"  # root is the reader's, who may have one there
    run_file.parent.mkdir(parents=True, exist_ok=True)
    write_named(run_file, as_text.run_file(run, "Of a run in a store."))
    return run, run_file
