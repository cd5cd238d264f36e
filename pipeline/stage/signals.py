"""Requests to stop: SIGTERM, as engines and clusters send it, Ctrl-C, and the end of an engine."""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
ENGINES = {"dvc", "snakemake", "lockstep", "pipeline"}  # the last two start stages, as `compare`
AGAIN = "the same command goes on"
SHOW_CURSOR = "\x1b[?25h"  # which a bar in a terminal hides
_cleanings: list[tuple[Callable[[], object], str]] = []
_received: list[int] = []  # inside `stopping`
_at_once: list[None] = []  # one for each block of `at_once`


def end_on_request() -> None:
    """Make this process end at once on SIGTERM and Ctrl-C, with one line, unless ignored.

    Whatever a stage does may be killed. An exception instead would be lost in a callback of JAX,
    or take XLA's compiler down with it. In the interpreter's last moments, when all is done and
    Python takes its handlers away, Ctrl-C is ignored.
    """
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    for number in _obeyed():
        signal.signal(number, _end)


def _obeyed() -> list[signal.Signals]:
    """Return the requests that this process was not started to ignore, as background jobs are."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def _end(number: int, _: FrameType | None) -> None:
    cursor = SHOW_CURSOR if sys.stderr.isatty() else ""
    name = signal.Signals(number).name
    # not through sys.stderr, whose buffer may be in use
    then = _cleanings[-1][1] if _cleanings else AGAIN
    os.write(2, f"\n{cursor}error: {name} received; {then}\n".encode())
    try:
        for clean, _ in _cleanings:
            clean()
    finally:
        os._exit(128 + number)


@contextmanager
def cleaning(clean: Callable[[], object], then: str = AGAIN) -> Iterator[None]:
    """Call `clean` at the end of the block, or of the process if a signal asks it to end in it.

    It may be called twice. `then` says in one line what the same command does after a request.
    """
    _cleanings.append((clean, then))
    try:
        yield
    finally:
        clean()
        _cleanings.pop()


@contextmanager
def stopping() -> Iterator[Callable[[], int]]:
    """Only record SIGTERM and Ctrl-C inside the block, so that a trainer can save before it ends.

    A second one is obeyed at once; those that this process was started to ignore are ignored. The
    block gets a function that returns the exit status to end with: 0 unless asked to stop.
    """

    def record(number: int, frame: FrameType | None) -> None:
        if _received or _at_once:
            _end(number, frame)
        _received.append(number)

    before = {number: signal.signal(number, record) for number in _obeyed()}
    try:
        yield lambda: 128 + _received[0] if _received else 0
    finally:
        _received.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def is_asked() -> bool:
    """Return whether a signal asked this process to stop, and it has not, inside `stopping`."""
    return bool(_received)


@contextmanager
def at_once() -> Iterator[None]:
    """Obey requests at once inside the block, even in `stopping`: the block may wait long."""
    if _received:
        _end(_received[0], None)
    _at_once.append(None)
    try:
        yield
    finally:
        _at_once.pop()


def watch_engine(poll_seconds: float = 0.5) -> None:
    """Make this process ask itself to stop when the engine that started it is gone (Linux only).

    A killed DVC, Snakemake or `lockstep compare` does not end its children: the shell between them
    lives on, and the trainer with it. So a stage watches its ancestors, from its parent up to the
    engine, and sends itself SIGTERM (on which a trainer saves) when one of them is gone. After
    Ctrl-C, which reaches the stage too, it sends none: a second request would be obeyed at once. A
    stage started by hand watches nothing.
    """
    ancestors = _up_to_engine()
    if ancestors:
        threading.Thread(target=_watch, args=(ancestors, poll_seconds), daemon=True).start()


def _watch(ancestors: dict[int, str], poll_seconds: float) -> None:
    while all((now := _stat(pid)) and now[2] == began for pid, began in ancestors.items()):
        time.sleep(poll_seconds)
    if not is_asked():
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(8)  # a stage that does not stop by then loses nothing either
    os._exit(1)


def _up_to_engine() -> dict[int, str]:
    """Return process id and start time of each ancestor up to the topmost engine."""
    chain: list[tuple[int, str]] = []
    engine = 0
    pid = os.getppid()
    while pid > 1 and (stat := _stat(pid)):
        name, parent, started = stat
        chain.append((pid, started))
        if ENGINES.intersection((name, _script(pid))):
            engine = len(chain)
        pid = parent
    return dict(chain[:engine])


def _script(pid: int) -> str:
    """Return the name of the script that an ancestor process runs, else of its program.

    Other arguments say nothing: `screen -S lockstep` is no engine.
    """
    program, *arguments = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
    script = next((argument for argument in arguments if not argument.startswith("-")), "")
    is_python = Path(program).name.startswith("python")
    return Path(script if is_python else program).name


def _stat(pid: int) -> tuple[str, int, str] | None:
    """Return an ancestor's name, parent and start time; None if it is gone or there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, rest = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
    state, parent, started = rest[0], int(rest[1]), rest[19]
    return None if state == "Z" else (name, parent, started)
