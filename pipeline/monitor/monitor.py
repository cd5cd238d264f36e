"""What a trainer tells of itself: status.json, the fields of its bar, Prometheus, and sinks."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.protocol.driver import RunProgress
from lockstep.transcript.entry import Entry
from pipeline import runfile
from pipeline.monitor import pause, prometheus
from pipeline.monitor.show import ranges
from pipeline.monitor.sinks.tracker import Tracker
from pipeline.monitor.status import Members, Status
from pipeline.stage.progress import size

SECONDS = 1.0  # at least, between two writes of status.json


class Monitor:
    """Tells where a training is: `with Monitor(run, path, folder, step) as monitor: ...`.

    Args:
      run: The whole run.
      path: Path of the run file.
      folder: The training's work in progress.
      step: Rounds that are behind it.
      held_out_loss: Held-out loss before the first round.
      scores: Returns the scores of tasks so far.
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
        self._stack = ExitStack()
        self.go_on()

    def __enter__(self) -> "Monitor":
        if self.run.runtime.metrics_port:
            serving = prometheus.serving(self.folder, self.run.runtime.metrics_port)
            self._stack.enter_context(serving)
        self._stack.enter_context(self.tracker)
        self._write()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._write()
        self._stack.__exit__(*raised)

    def go_on(self) -> None:
        """Measure the rate from the next round on: the first round compiles, and a pause waits."""
        self._began, self._rounds, self._tokens = None, 0, 0

    def must_pause(self) -> bool:
        """Return whether the run's owner wants the training to pause, or to stay paused."""
        return pause.is_asked(self.folder)

    def paused(self) -> None:
        """Tell that the training waits to be resumed."""
        self._update(state="paused", rounds_per_second=None, tokens_per_second=None)
        self._write()

    def took(self, progress: RunProgress, entry: Entry) -> None:
        """Tell of a round that was taken; `progress` is the run after it."""
        measured = entry.held_out_loss
        sequences = sum(entry.round.sequences[peer] for peer in entry.evidence.messages)
        rates: dict[str, float | None] = {"rounds_per_second": None, "tokens_per_second": None}
        if self._began is None:
            self._began = time.monotonic()
        else:
            self._rounds += 1
            self._tokens += sequences * self.run.llm.max_seq_len
            seconds = time.monotonic() - self._began
            rates = {
                "rounds_per_second": self._rounds / seconds,
                "tokens_per_second": self._tokens / seconds,
            }
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
        self.tracker.took(entry, **rates)
        if time.monotonic() - self._written > SECONDS:
            self._write()

    @property
    def fields(self) -> dict[str, str]:
        """What the bar shows: numbers, and who is there, who verifies, who is late."""
        status, peers = self.status, self.status.peers
        shown = {
            "loss": _number(status.loss, "{:.3f}"),
            "held_out": _number(status.held_out_loss, "{:.3f}"),
            "tokens_per_second": _number(status.tokens_per_second, "{:,.0f}"),
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
