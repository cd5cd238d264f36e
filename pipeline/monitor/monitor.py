"""How a trainer reports: status.json, its bar, trackers; and how its owner pauses or stops it."""

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.machine.progress import Progress, size
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.checkpoints import Checkpoints
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from pipeline import runfile
from pipeline.monitor.tracker import Tracker
from pipeline.monitor.training import Members, Status, is_pause_asked, ranges

SECONDS = 1.0  # at least, between two writes of status.json
POLL_SECONDS = 0.2  # of a paused training, for the end of the pause
log = logging.getLogger(__name__)


class Monitor:
    """Tells where a training is: `with Monitor(run, path, folder, step) as monitor: ...`.

    `path` is the run file's, `folder` the training's work in progress, `step` the rounds that are
    behind it, and `held_out_loss` that before the first round; `scores` is as in `Tracker`.
    """

    def __init__(
        self,
        run: runfile.Run,
        path: Path,
        folder: Path,
        step: int,
        held_out_loss: float | None = None,
        scores: Callable[[], Sequence[tuple[Any, ...]]] = list,
    ):
        self.run, self.folder = run, folder
        self.status = Status(
            run=str(path),
            process=os.getpid(),
            round=step,
            rounds=run.config.total_steps,
            held_out_loss=held_out_loss,
            updated=time.time(),
        )
        self._written = 0.0
        self.tracker = Tracker(run, folder, step, scores)
        unit, self._words = run.llm.counted
        self._rate = f"{unit}_per_second"
        self._began, self._rounds, self._seen = None, 0, 0

    def __enter__(self) -> "Monitor":
        self.tracker.__enter__()
        self._write()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._write()
        self.tracker.__exit__(*raised)

    def go_on(self) -> None:
        """Measure the monitor's rate from the next round on: compiling and pauses do not count."""
        self._began, self._rounds, self._seen = None, 0, 0

    def must_pause(self) -> bool:
        """Return whether the run's owner wants the training to pause, or to stay paused."""
        return is_pause_asked(self.folder)

    def paused(self) -> None:
        """Tell by the monitor that the training waits to be resumed."""
        self._update(state="paused", **dict.fromkeys(("rounds_per_second", self._rate)))
        self._write()

    def took(self, progress: RunProgress, entry: Entry) -> None:
        """Tell the monitor of a round that was taken; `progress` is the run after it."""
        measured = entry.held_out_loss
        sequences = sum(entry.round.sequences[peer] for peer in entry.evidence.messages)
        rates: dict[str, float | None] = {"rounds_per_second": None, self._rate: None}
        if self._began is None:
            self._began = time.monotonic()
        else:
            self._rounds += 1
            self._seen += sequences * self.run.llm.max_seq_len // self._words
            seconds = time.monotonic() - self._began
            rates = {"rounds_per_second": self._rounds / seconds, self._rate: self._seen / seconds}
        sizes = [message.bytes for message in entry.evidence.messages.values()]
        self._update(
            state="training",
            round=entry.round.step,
            epoch=entry.round.epoch,
            loss=entry.loss,
            held_out_loss=self.status.held_out_loss if measured is None else measured,
            message_bytes=float(np.mean(sizes)) if sizes else None,
            peers=Members.after(progress, entry),
            **rates,
        )
        self.tracker.took(entry, rates)
        if time.monotonic() - self._written > SECONDS:
            self._write()

    @property
    def fields(self) -> dict[str, str]:
        """Return what the monitor's bar shows: numbers, and who trains, verifies or is late."""
        status, peers = self.status, self.status.peers
        shown = {
            "loss": _number(status.loss, "{:.3f}"),
            "held_out": _number(status.held_out_loss, "{:.3f}"),
            self._rate: _number(getattr(status, self._rate), "{:,.0f}"),
            "sent_per_peer": "-" if status.message_bytes is None else size(status.message_bytes),
            "train": ranges(peers.training),
            "verify": ranges(peers.verifying),
            "late": ranges(peers.late),
        }
        return {name: text for name, text in shown.items() if text}

    def _update(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes | {"updated": time.time()})

    def _write(self) -> None:
        self._written = time.monotonic()
        with suppress(OSError):  # a full disk ends the training where it loses something
            self.status.write(self.folder)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


@dataclass
class Terminal(Observer):
    """Tells the monitor and the terminal of each round."""

    bar: Progress
    monitor: Monitor
    #: Returns a block whose time counts for a phase of the round.
    timed: Callable[[str], AbstractContextManager[None]]

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Tell the monitor and the terminal of a round that is on record."""
        with self.timed("tell"):
            self.monitor.took(progress, entry)
        _say_who(entry)
        self.bar.advance(**self.monitor.fields)


def _say_who(entry: Entry) -> None:
    """Log for the monitor the peers that left the run or joined it."""
    step = entry.round.step
    for peer, why in entry.decision.ejected.items():
        log.info(f"train: round {step}: peer {peer} is ejected: {why}")
    for peer in entry.decision.dropped:
        log.info(f"train: round {step}: nobody heard from peer {peer}; it leaves the epoch")
    for peer in entry.left:
        log.info(f"train: round {step}: peer {peer} has left")
    for peer in entry.round.joined:
        log.info(f"train: round {step}: peer {peer} has joined")


# ---- Requests of the owner ----


class Stops(Observer):
    """Ends the process after a signal, once its last round is saved.

    `asked_to_stop` returns the status to end with, or 0; after round `last` the training ends by
    itself.
    """

    def __init__(self, asked_to_stop: Callable[[], int], checkpoints: Checkpoints, last: int):
        self.asked_to_stop, self.checkpoints, self.last = asked_to_stop, checkpoints, last
        self._status = 0

    def must_save(self, entry: Entry) -> bool:
        """Return whether a signal asked the process to end, once its last round is saved."""
        self._status = 0 if entry.round.step == self.last else self.asked_to_stop()
        return bool(self._status)

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """End the process, if a signal came before the monitored round was saved."""
        if self._status:
            self.stop(self._status, entry.round.step)

    def stop(self, status: int, step: int) -> None:
        """End the process; the newest checkpoint is of round `step`."""
        self.checkpoints.close()
        log.info(f"train: stopped after round {step}; the same command goes on")
        sys.exit(status)


@dataclass
class Pauses(Observer):
    """Waits while the run is paused, and ends the process if it is asked to meanwhile.

    The checkpoint is saved already.
    """

    monitor: Monitor
    stops: Stops

    def begins(self, step: int, progress: RunProgress) -> None:
        """Wait until the owner resumes the paused run."""
        if not (progress.pausing and self.monitor.must_pause()):
            return
        log.info(f"train: paused after round {step - 1}; `lockstep resume` goes on")
        self.monitor.paused()
        while self.monitor.must_pause():
            if status := self.stops.asked_to_stop():
                self.stops.stop(status, step - 1)
            time.sleep(POLL_SECONDS)
        log.info("train: resumed")
        self.monitor.go_on()
