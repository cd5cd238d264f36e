"""Tells the trackers of runs that a run file names what a training does, as it does it."""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from lockstep.errors import brief
from lockstep.transcript.curves import Totals
from lockstep.transcript.entry import Entry, Header
from lockstep.transcript.transcript import Transcript
from pipeline import extras, runfile
from pipeline.monitor.sinks import SINKS, Scalars, TrackedRun, leave
from pipeline.runfile.method import learning_rate_of_run
from pipeline.subject import subject_of

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 120.0  # at a training's end, for a step of a sink; W&B takes up to 90 to begin
FOLDER = "tracked"  # beside data/runs


def check(run: runfile.Run) -> None:
    """Check that the packages of the run's trackers are installed."""
    for name in run.runtime.sinks:
        if not extras.is_installed(SINKS[name].module):
            raise extras.lacking(f'[runtime] sinks has "{name}"', SINKS[name].module)


class Tracker:
    """Tells a run's sinks of each round: `with Tracker(run, folder, step) as tracker: ...`.

    Nothing that goes wrong with a sink reaches the training: each has a thread of its own, and one
    that fails is a warning. Without sinks, nothing is done or read.

    `folder` is the training's work in progress with its transcript, and `step` the rounds that are
    behind it. `scores` returns the scores of tasks so far: step, task, metric, value, and more.
    """

    def __init__(
        self,
        run: runfile.Run,
        folder: Path,
        step: int,
        scores: Callable[[], Sequence[tuple[Any, ...]]] = list,
    ):
        self.run, self.folder, self.step, self.scores = run, folder, step, scores
        self._feeds: list[_Feed] = []
        self._scored = 0  # rows of scores that were told

    def __enter__(self) -> "Tracker":
        if self.run.runtime.sinks:
            self._begin(Transcript(self.folder / "transcript"))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for feed in self._feeds:
            feed.end(finished=kind is None)
        for feed in self._feeds:
            feed.wait()
        leaving = threading.Thread(target=leave, daemon=True)  # which may hang too
        leaving.start()
        leaving.join(PATIENCE_SECONDS)

    def took(self, entry: Entry, rates: Mapping[str, float | None]) -> None:
        """Report to the trackers a round that was taken; its entry has any measured held-out loss.

        `rates` are those of the training so far, None where one is unknown.
        """
        if self._feeds:
            speeds = {f"speed/{name}": rate for name, rate in rates.items()}
            self._tell(entry.round.step, self._scalars(entry) | _without_none(speeds))
            for step, scalars in self._new_scores():
                self._tell(step, scalars)

    def _tell(self, step: int, scalars: Scalars) -> None:
        for feed in self._feeds:
            feed.put(step, scalars)

    def _new_scores(self) -> list[tuple[int, dict[str, float]]]:
        rows = self.scores()[self._scored :]
        self._scored += len(rows)
        scores = []
        for step, task, metric, value, *_ in rows:
            name = re.sub(r"[^\w./ -]", "_", f"tasks/{task}/{metric}")
            scores.append((step, {name: float(value)}))
        return scores

    def _begin(self, transcript: Transcript) -> None:
        header, entries, runtime = transcript.header, transcript.rounds, self.run.runtime
        first = entries[0].round.step - 1 if entries else self.step
        self._totals = Totals(
            self.run.llm.max_seq_len, self.run.peers.count, self.run.links.topology
        )
        self._learning_rate = learning_rate_of_run(self.run, first)
        behind = [(first, self._measured(header.held_out_loss))]
        behind += [(entry.round.step, self._scalars(entry)) for entry in entries]
        behind = sorted(behind + self._new_scores(), key=itemgetter(0))
        tracked = TrackedRun(
            key=header.key,
            name=_name(self.run, header),
            project=runtime.sink_project,
            folder=Path(runtime.sink_dir or self.folder.parent.parent / FOLDER),
            settings=self.run.model_dump(mode="json", exclude={"runtime"}),
            step=self.step,
        )
        self._feeds = [_Feed(name, tracked, behind) for name in runtime.sinks]

    def _measured(self, held_out_loss: float | None) -> dict[str, float]:
        if held_out_loss is None:
            return {}
        measured = {"loss/held_out": held_out_loss}
        if subject_of(self.run).has_perplexity:
            # at most the largest that a float has
            measured["loss/perplexity"] = math.exp(min(held_out_loss, 700.0))
        return measured

    def _scalars(self, entry: Entry) -> dict[str, float]:
        row, decision = self._totals.row(entry), entry.decision
        sizes = [message.bytes for message in entry.evidence.messages.values()]
        unit, words = self.run.llm.counted
        numbers = {
            "loss/train": row["loss"],
            f"data/{unit}": row["tokens"] // words,
            "bytes/up": row["bytes_up"],
            "bytes/down": row["bytes_down"],
            "bytes/message": sum(sizes) / len(sizes) if sizes else None,
            "optimizer/learning_rate": float(self._learning_rate(row["step"])),
            "peers/applied": len(decision.applied),
            "peers/late": len(decision.late),
            "clock/simulated_seconds": row["seconds"],
        }
        return _without_none(numbers) | self._measured(row["held_out_loss"])


def _name(run: runfile.Run, header: Header) -> str:
    """Return the name that trackers show: optimizer, number of parameters and key."""
    parameters = float(subject_of(run).parameters(header.model))
    unit = ""
    for larger in ("k", "M", "B"):
        if parameters >= 999.5:
            parameters, unit = parameters / 1000, larger
    digits = ".1f" if parameters < 99.95 and unit else ".0f"
    return f"{run.llm.optimizer.tag().lower()}-{parameters:{digits}}{unit}-{header.key}"


def _without_none(numbers: dict[str, float | None]) -> dict[str, float]:
    return {name: float(number) for name, number in numbers.items() if number is not None}


class _Feed:
    """A tracker's sink and the thread that tells it: what is behind the training, then rounds."""

    def __init__(self, name: str, run: TrackedRun, behind: Sequence[tuple[int, Scalars]]):
        self.name, self._run = name, run
        self._queue: SimpleQueue = SimpleQueue()
        for step, scalars in behind:
            self.put(step, scalars)
        self._finished = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"sink {name}")
        self._thread.start()

    def put(self, step: int, scalars: Scalars) -> None:
        self._queue.put((step, time.time(), scalars))

    def end(self, *, finished: bool) -> None:
        self._finished = finished
        self._queue.put(None)

    def wait(self) -> None:
        """Wait for the sink's end as long as it goes on, however slow a loaded machine is."""
        left = -1
        while self._thread.is_alive() and left != self._queue.qsize():
            left = self._queue.qsize()
            self._thread.join(PATIENCE_SECONDS)
        if self._thread.is_alive():
            what = f"did nothing for {PATIENCE_SECONDS:g} s, with {left} steps left"
            log.warning(f"train: warning: sink {self.name} {what}")

    def _work(self) -> None:
        try:
            sink = SINKS[self.name]()
            last = sink.open(self._run)
            while (item := self._queue.get()) is not None:
                if item[0] > last:
                    sink.log(*item)
            sink.close(finished=self._finished)
        except Exception as error:  # whatever a package of others may raise
            what = brief(f"{type(error).__name__}: {error}", 200)
            log.warning(f"train: warning: sink {self.name}: {what}; training goes on without it")
