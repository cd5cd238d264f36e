"""What the commands do: open a run in a store, and take part in one or follow it."""

from pathlib import Path

import tomlkit

from lockstep.errors import LockstepError
from lockstep.files import write_text
from lockstep.machine.progress import size
from parts.volunteers import keys
from parts.volunteers.chain import opening
from parts.volunteers.store.probe import probe
from parts.volunteers.store.schemes import open_store
from pipeline import runfile
from pipeline.command_line import run_stage
from pipeline.stage import devices
from pipeline.stage.artifacts import Paths
from pipeline.start import begin

STAGES = "download", "convert", "train"


def open_run(address: str, run_file: Path, root: Path, key_file: Path) -> None:
    """Open the run of a run file in a store, whose rights and conditions are tried first."""
    run, paths, key = runfile.load(run_file), Paths("train", run_file, root), keys.read(key_file)
    if run.links.clock != "store":
        raise LockstepError(
            f'{run_file}: links.clock is "{run.links.clock}", expected "store" for volunteers'
        )
    store = open_store(address, run.runtime)
    probe(store)
    devices.prepare(run)
    setup = begin.read(run, paths.need("convert"), paths.need("download"))
    document = opening.open_run(store, setup, key)
    print(f"open: {address}: {document.slots} slots, {size(document.payload_bytes)} a message")


def join(address: str, root: Path, key_file: Path | None) -> None:
    """Take part in a run with a key, or follow it without one, up to its last round."""
    document, _, _ = opening.read_run(open_store(address))
    if document.release != (here := opening.release()):
        raise LockstepError(f"{address}: release {document.release}, expected {here}, as here")
    if key_file is not None:
        keys.read(key_file)  # before anything is fetched
    tables = document.run | {
        "runtime": {"store": address, "volunteer_key": str(key_file.absolute()) if key_file else ""}
    }
    run = runfile.parse(tables, f"{address}/run.json")
    root.mkdir(parents=True, exist_ok=True)
    run_file = root / "run.toml"
    write_text(run_file, tomlkit.dumps(_without_nulls(tables)))
    others = run.peers.count - 1
    print(
        f"join: {run.config.total_steps} rounds; in each, {size(document.payload_bytes)} up and "
        f"{size(others * document.payload_bytes)} down"
    )
    for stage in STAGES:
        run_stage(stage, run_file, root)


def _without_nulls(value: object) -> object:
    """Return a document of JSON as TOML can hold it: an absent key is null."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list | tuple) else value
