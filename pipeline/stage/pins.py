"""Pins: the SHA-256 of inputs from outside the repository.

A folder, a hub's branch or an installed package can change under an unchanged run file. With a pin
in `[pins]`, a stage refuses an input that has changed, and a result of another one is not current
(artifacts.py); without one, it logs that, and its result records what was read.
"""

from pathlib import Path

import tomlkit

from lockstep.errors import LockstepError
from lockstep.files import write_named
from pipeline.stage.artifacts import INPUTS, Paths, verify

LATER = "evaluate"  # reads tasks, once there is a model


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
    for stage, (_, file, *_) in INPUTS.items():
        paths = Paths(stage, run, root)
        if stage != LATER or (paths.is_made(stage) and (paths.out(stage) / file).is_file()):
            pins |= verify(paths.made(stage), [file])["inputs"]
    document = tomlkit.parse(run.read_text(encoding="utf-8"))
    table = document.setdefault("pins", tomlkit.table())  # a file with a base may have none
    for key, pin in pins.items():
        table[key] = pin
    write_named(run, tomlkit.dumps(document))
    return pins
