"""A watch on the engine: a stage ends when the engine that started it ends.

A killed DVC or Snakemake does not end its children: the shell between them lives on, and the
trainer with it. So a stage watches its ancestors, from its parent up to the engine, and sends
itself SIGTERM (on which a trainer saves) when one of them is gone. A stage started by hand watches
nothing.
"""

import os
import signal
import threading
import time
from pathlib import Path

ENGINES = ("dvc", "snakemake")


def watch(poll_seconds: float = 0.5, grace_seconds: float = 8.0) -> None:
    """Start the watch if an engine is among this process's ancestors (Linux only)."""
    ancestors = _up_to_engine()
    if ancestors:
        arguments = (ancestors, poll_seconds, grace_seconds)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()


def _watch(ancestors: dict[int, str], poll_seconds: float, grace_seconds: float) -> None:
    while all(_started(pid) == started for pid, started in ancestors.items()):
        time.sleep(poll_seconds)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_seconds)  # a stage that does not stop by then loses nothing either
    os._exit(1)


def _up_to_engine() -> dict[int, str]:
    """Process id and start time of each ancestor up to the topmost engine; empty without one."""
    chain: list[tuple[int, str]] = []
    engine = 0
    pid = os.getppid()
    while pid > 1 and (stat := _stat(pid)):
        name, parent, started = stat
        chain.append((pid, started))
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
        names = {name, *(Path(os.fsdecode(argument)).name for argument in command)}
        if names.intersection(ENGINES):
            engine = len(chain)
        pid = parent
    return dict(chain[:engine])


def _stat(pid: int) -> tuple[str, int, str] | None:
    """Name, parent and start time of a process; None if it is gone or there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    state, parent, started = rest[0], int(rest[1]), rest[19]
    return None if state == "Z" else (name, parent, started)


def _started(pid: int) -> str | None:
    stat = _stat(pid)
    return stat[2] if stat else None
