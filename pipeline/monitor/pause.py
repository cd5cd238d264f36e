"""A pause: a file in a training's folder asks for it, until it is removed.

A paused training waits in its process, with its devices and its state as they are, so that the
engine that started it waits too and nothing is read or compiled again. If you need its memory, stop
it instead: Ctrl-C saves, and the same command goes on.
"""

from pathlib import Path

REQUEST = "pause"


def is_asked(folder: Path) -> bool:
    """Return whether a training is asked to pause, or to stay paused."""
    return (folder / REQUEST).exists()


def ask(folder: Path) -> None:
    """Ask for a pause."""
    (folder / REQUEST).touch()


def withdraw(folder: Path) -> None:
    """Let the training go on."""
    (folder / REQUEST).unlink(missing_ok=True)
