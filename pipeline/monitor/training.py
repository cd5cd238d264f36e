"""A training in progress, as its status.json describes it: seen and paused from another process.

A file in the training's folder asks for a pause, until it is removed. A paused training waits in
its process, with its devices and its state as they are, so the engine that started it waits too and
nothing is read or compiled again. If you need its memory, stop it instead: Ctrl-C saves, and the
same command goes on.
"""

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from lockstep.errors import LockstepError, expecting
from lockstep.files import writes
from lockstep.machine.progress import size
from lockstep.protocol.closing import sender
from lockstep.protocol.driver import RunProgress
from lockstep.protocol.run_state import ClientState
from lockstep.tables.table import Table
from lockstep.tables.validation import meant, validate_json
from lockstep.transcript.entry import Entry
from pipeline.stage import lock
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import RUN_FILE

STATUS_FILE, PAUSE_FILE = "status.json", "pause"
STATES = {
    "starting": "starting: no round is taken yet",
    "training": "training",
    "pausing": "training until this round is over, then paused",
    "paused": "paused; `lockstep resume` goes on",
    "stopped": "stopped; the same command goes on",
}
"""What each state means; a stopped training has no process: it was killed, or asked to stop."""


class Members(Table):
    """The training's peers by their roles in the last round, and those without one."""

    training: tuple[int, ...] = ()  #: Peers that trained.
    verifying: tuple[int, ...] = ()  #: Peers that recomputed others' steps.
    witnessing: tuple[int, ...] = ()  #: Peers that attested to what arrived.
    late: tuple[int, ...] = ()  #: Peers whose message arrived too late, or never.
    waiting: tuple[int, ...] = ()  #: Peers that asked to take part, and do from the next epoch on.
    dropped: tuple[int, ...] = ()  #: Peers that are out of the epoch, since nobody heard from them.
    left: tuple[int, ...] = ()  #: Peers that left by themselves.
    ejected: tuple[int, ...] = ()  #: Proven liars, out of the run.

    @classmethod
    def after(cls, progress: RunProgress, entry: Entry) -> "Members":
        """Return, for status.json, who did what in a round; `progress` is the run after it."""
        round_, state, silent = entry.round, progress.state, {*entry.evidence.silent}

        def not_silent(peers: Collection[int]) -> tuple[int, ...]:
            return tuple(sorted({*peers} - silent))

        dropped = {r.peer for r in state.exited if r.state == ClientState.Dropped}
        return cls(
            training=not_silent(round_.assignment),
            verifying=not_silent(round_.verifiers),
            witnessing=not_silent(round_.witnesses),
            late=not_silent({*map(sender, entry.decision.late)}),
            waiting=tuple(sorted(state.pending)),
            dropped=tuple(sorted(dropped - {*state.pending})),
            left=tuple(sorted(progress.left)),
            ejected=tuple(sorted(state.ejected)),
        )


class Status(Table):
    """status.json: where a training is."""

    state: Literal["starting", "training", "paused"] = "starting"  #: What it does.
    run: str  #: Path of the run file.
    process: int  #: Its process id.
    round: int  #: The last round that was taken; 0 before the first.
    rounds: int  #: The run's last round.
    epoch: int = 0  #: The epoch of the last round, from 0.
    loss: float | None = None  #: Mean loss of the peers before the last round, nats per token.
    held_out_loss: float | None = None  #: The last that was measured, nats per token.
    #: Mean rate since training began, or went on; null before the second round.
    rounds_per_second: float | None = None
    tokens_per_second: float | None = None  #: The same, in tokens of all peers.
    rows_per_second: float | None = None  #: In rows, where the data are no tokens.
    #: Bytes that a peer sent in the last round, mean over peers.
    message_bytes: float | None = None
    peers: Members = Members()  #: Who takes part in it.
    updated: float  #: When this was written, seconds since 1970.

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the training's last round, at the mean rate."""
        if not self.rounds_per_second:
            return None
        return (self.rounds - self.round) / self.rounds_per_second

    def write(self, folder: Path) -> None:
        """Replace status.json of the training, without flushing it to disk."""
        aside = folder / f".{STATUS_FILE}.part"
        aside.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(aside, folder / STATUS_FILE)


def is_pause_asked(folder: Path) -> bool:
    """Return whether the training in `folder` is asked to pause, or to stay paused."""
    return (folder / PAUSE_FILE).exists()


class Training(NamedTuple):
    """A training that has not ended, seen from another process."""

    folder: Path  #: Its work in progress, `data/runs/<key>`.
    status: Status  #: What it wrote last.
    process: int | None  #: The process that holds its lock, or None.

    @property
    def state(self) -> str:
        """Whether the training runs, is paused or was killed: a name of `STATES`."""
        if self.process is None:
            return "stopped"
        if self.process != self.status.process:  # which has not told anything yet
            return "starting"
        if self.status.state == "training" and is_pause_asked(self.folder):
            return "pausing"
        return self.status.state

    @property
    def name(self) -> str:
        """The training's run file and its key."""
        return f"{self.status.run}, key {self.folder.name}"

    def can_pause(self) -> bool:
        """Return whether the training runs, and is not asked to pause yet."""
        return self.state in ("starting", "training")

    def can_resume(self) -> bool:
        """Return whether the training is asked to pause, or to stay paused."""
        return is_pause_asked(self.folder)

    @property
    def disk_bytes(self) -> int:
        """Bytes of the training's work in progress."""
        total = 0
        for parent, _, names in os.walk(self.folder):
            for name in names:
                with suppress(FileNotFoundError):  # replaced or removed meanwhile
                    total += os.stat(os.path.join(parent, name)).st_size
        return total

    @property
    def free_bytes(self) -> int:
        """Free bytes of the disk that the training writes to."""
        return shutil.disk_usage(self.folder).free

    def pause(self) -> str:
        """Ask the training for a pause, and return what comes of it."""
        if not self.can_pause():
            raise LockstepError(
                f"{self.folder}: the training is {self.state}, expected a running one"
            )
        with writes(self.folder):
            (self.folder / PAUSE_FILE).touch()
        return "once its round is over, the training waits; `lockstep resume` lets it go on"

    def resume(self) -> str:
        """Take a pause of the training back, and return what comes of it."""
        if not self.can_resume():
            raise LockstepError(
                f"{self.folder}: the training is {self.state}, expected one that was paused"
            )
        with writes(self.folder):
            (self.folder / PAUSE_FILE).unlink(missing_ok=True)
        return "the training goes on" if self.process else "the same command as before goes on"

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of each line that `lockstep status` prints."""
        status, peers = self.status, self.status.peers
        process = f", process {self.process}" if self.process else ""
        yield "run", f"{status.run}{process}"
        yield "state", STATES[self.state]
        ago = duration(max(0.0, time.time() - status.updated))
        yield "round", f"{status.round} of {status.rounds}, epoch {status.epoch}, {ago} ago"
        if status.rounds_per_second and self.process:
            seen = {"tokens": status.tokens_per_second, "rows": status.rows_per_second}.items()
            rates = (f", {rate:,.0f} {unit}/s" for unit, rate in seen if rate is not None)
            yield "rate", f"{status.rounds_per_second:,.3g} rounds/s" + "".join(rates)
            yield "left", duration(status.seconds_left or 0.0)
        if status.loss is not None:
            held_out = status.held_out_loss
            measured = "" if held_out is None else f", held out {held_out:.3f}"
            yield "loss", f"{status.loss:.3f}{measured}"
        for name, value in peers:
            if value:
                yield name, ranges(value)
        if status.message_bytes is not None:
            yield "sent", f"{size(status.message_bytes)} by each peer in a round"
        free = size(self.free_bytes)
        yield "disk", f"{size(self.disk_bytes)} in {self.folder}, {free} free"

    def to_json(self) -> dict:
        """Return what `lockstep status --json` prints of the training."""
        return self.status.model_dump(mode="json") | {
            "state": self.state,
            "process": self.process,
            "seconds_left": self.status.seconds_left,
            "folder": str(self.folder),
            "disk_bytes": self.disk_bytes,
            "free_bytes": self.free_bytes,
        }


def read(folder: Path) -> Training:
    """Return the training whose work in progress is in `folder`."""
    path = folder / STATUS_FILE
    with expecting(path, "where a training is"):
        status = validate_json(Status, path.read_bytes(), str(path))
    return Training(folder, status, lock.holder(folder.with_name(f"{folder.name}.lock")))


def in_progress(root: Path) -> list[Training]:
    """Return the trainings below `root`, at least one: those that go on, then by when they did."""
    runs = Paths("train", Path(RUN_FILE), root).runs
    trainings = [read(path.parent) for path in runs.glob(f"*/{STATUS_FILE}")]
    if not trainings:
        raise LockstepError(
            f"{runs}: no training in progress, expected one that runs or was killed; "
            "`lockstep summary` shows a finished one"
        )
    # those that go on in the order of their keys: what each wrote last is of this second
    return sorted(
        trainings,
        key=lambda t: (t.process is None, 0 if t.process else -t.status.updated, t.folder),
    )


def asked(root: Path, key: str | None, can: Callable[[Training], bool]) -> Training:
    """Return the training that is asked for: the one of this key, or the only one that can.

    Raises:
      LockstepError: No training has that key, or several can and no key is given.
    """
    trainings = in_progress(root)
    if key is not None:
        found = [training for training in trainings if training.folder.name == key]
    else:
        found = [training for training in trainings if can(training)] or trainings[:1]
    if len(found) != 1:
        names = "; ".join(training.name for training in found or trainings)
        raise LockstepError(
            f"--key: found {key or 'none'}, expected that of one of these trainings: {names}"
            + meant([training.folder.name for training in trainings], key or "")
        )
    return found[0]


def ranges(peers: Sequence[int]) -> str:
    """Return ascending numbers of peers as text for the status: 0-3 5."""
    runs: list[list[int]] = []
    for peer in peers:
        if runs and peer == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], peer]
        else:
            runs.append([peer])
    return " ".join("-".join(map(str, run)) for run in runs)


def duration(seconds: float) -> str:
    """Return a number of seconds as text for the status, in its two largest units: 3 h 12 min."""
    left, parts = round(seconds), []
    for name, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])
