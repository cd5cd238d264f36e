"""Pins: the SHA-256 of inputs from outside the repository.

A folder, a hub's branch or an installed package can change under an unchanged run file. With a pin
in `[pins]`, a stage refuses an input that has changed; without one, it logs that, and its result
records what was read.
"""

from pathlib import Path

import tomlkit

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_text
from pipeline.stage.artifacts import Paths, verify

# For each key of [pins], the stage that reads the input, and where its result records the SHA-256.
RECORDED = {"data": ("download", "shards.json", "source"), "checkpoint": ("convert", "source.json")}
TASKS = ("evaluate", "tasks/hashes.json")  # the same of a run that lm_eval gave tasks


def check(key: str, pin: str, sha256: str, what: str) -> str:
    """Compare the hash of an input with its pin; return "pinned" or "not pinned" for the log."""
    if not pin:
        return "not pinned"
    if pin != sha256:
        raise LockstepError(
            f"[pins] {key} = {pin}, but {what} has sha256 {sha256}: expected what was pinned; "
            'restore it, or set the pin to this value, or to "" for none'
        )
    return "pinned"


def write(run: Path, root: Path) -> dict[str, str]:
    """Set every pin of a run file to what its stages read, and keep its comments.

    Tasks are pinned once stage evaluate has run them.
    """
    pins = {}
    for key, (stage, file, *within) in _read(run, root).items():
        paths = Paths(stage, run, root)
        verify(paths.made(stage), [file])
        record = read_json(paths.out(stage) / file)
        for name in within:
            record = record[name]
        pins[key] = record["sha256"]
    document = tomlkit.parse(run.read_text(encoding="utf-8"))
    table = document.setdefault("pins", tomlkit.table())  # a file with a base may have none
    for key, pin in pins.items():
        table[key] = pin
    write_text(run, tomlkit.dumps(document))
    return pins


def _read(run: Path, root: Path) -> dict[str, tuple[str, ...]]:
    """Return RECORDED, and TASKS if there is such a result."""
    stage, file = TASKS
    paths = Paths(stage, run, root)
    made = paths.is_made(stage) and (paths.out(stage) / file).exists()
    return RECORDED | ({"tasks": TASKS} if made else {})
