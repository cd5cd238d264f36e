"""Pins: what lies outside the repository, held to the SHA-256 that it had.

A folder, a hub's branch or a Python's own library can change under an unchanged run file. With a
pin in `[pins]` a stage refuses what is no longer the same; without one it says so, and its result
records what was read.
"""

from pathlib import Path

import tomlkit

from pipeline.errors import LockstepError
from pipeline.stage.artifacts import Paths, read_json, write_text

# A key of [pins] -> the stage that reads it, and where that stage's result says what was read.
READ = {"data": ("download", "shards.json", "source"), "checkpoint": ("convert", "source.json")}


def check(key: str, pin: str, found: str, what: str) -> str:
    """Compares what was read with its pin; "pinned" or "not pinned", for the log.

    Args:
      key: of `[pins]`.
      pin: its value, "" where there is none.
      found: SHA-256 of what was read.
      what: what that was.

    Raises:
      LockstepError: they differ.
    """
    if not pin:
        return "not pinned"
    if pin != found:
        raise LockstepError(
            f"[pins] {key} = {pin}, but {what} has sha256 {found}: it has changed since; restore "
            'it, or set the pin to that, or to "" for none'
        )
    return "pinned"


def write(run: Path, root: Path) -> dict[str, str]:
    """Sets every pin of a run file to what its stages read; comments stay as they are.

    Raises:
      LockstepError: One of the stages has no result of the current run file.
    """
    pins = {}
    for key, (stage, file, *within) in READ.items():
        paths = Paths(stage, run, root)
        paths.made(stage)
        found = read_json(paths.out(stage) / file)
        for name in within:
            found = found[name]
        pins[key] = found["sha256"]
    document = tomlkit.parse(run.read_text(encoding="utf-8"))
    for key, pin in pins.items():
        document["pins"][key] = pin
    write_text(run, tomlkit.dumps(document))
    return pins
