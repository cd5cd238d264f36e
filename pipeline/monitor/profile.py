"""A profile of some rounds: an XLA trace of them, and where their time goes by plain clocks."""

import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import jax

from lockstep.errors import LockstepError, brief
from lockstep.files import write_text
from lockstep.protocol.driver import RunProgress
from lockstep.tables.table import Table
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from pipeline import runfile

PROFILES, TIMES = "profiles", "times.json"  # the folder is beside data/runs
OTHER_WORK = "other"
log = logging.getLogger(__name__)


class RoundTimes(Table):
    """times.json: real time of the profiled rounds, by phase."""

    first: int  #: The first round.
    last: int  #: The last round.
    seconds: float  #: Time of all of them together.
    #: Seconds of each phase, in the order of a round; what is in none of them is `other`.
    phases: dict[str, float]

    def rows(self) -> Iterator[tuple[str, float, float]]:
        """Yield each profiled phase, its milliseconds in a round, and its share of the time."""
        rounds = self.last - self.first + 1
        for name, seconds in self.phases.items():
            yield name, 1000 * seconds / rounds, seconds / self.seconds


class Profile(Observer):
    """Profiles the rounds of `[runtime] profile`, and does nothing in the others.

    Inside a phase of a profiled round, what JAX was told to compute is waited for, so that its time
    counts where it was asked for; the same is computed in the same order, so the bits are the same.
    """

    def __init__(self, run: runfile.Run, folder: Path):
        self.rounds = run.runtime.profiled
        self.folder = folder.parent.parent / PROFILES / folder.name
        self._first: int | None = None  # of those that are profiled now

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._first is not None:
            self._write()

    def begins(self, step: int, progress: RunProgress) -> None:
        """Begin a round, and the profile if it is the first one, or the first after a resume."""
        if not self.rounds or not self.rounds[0] <= step <= self.rounds[1]:
            return
        if self._first is None:
            shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier start
            try:
                jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            except (OSError, RuntimeError) as error:
                self._give_up(error)
                return
            self._first, self._last, self._seconds, self._phases = step, step - 1, 0.0, {}
        self._began = time.perf_counter()

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """End a round, and the profile if it is the last one."""
        if self._first is not None and self.rounds:
            self._seconds += time.perf_counter() - self._began
            self._last = entry.round.step
            if self._last == self.rounds[1]:
                self._write()

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Return a block whose time a profile counts for a phase; none lies in another."""
        return nullcontext() if self._first is None else self._timed(phase)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation(phase):
            yield
            for array in jax.live_arrays():
                with suppress(RuntimeError):  # another thread has deleted it meanwhile
                    array.block_until_ready()
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - began

    def _write(self) -> None:
        assert self._first is not None
        first, self._first = self._first, None
        rest = self._seconds - sum(self._phases.values())
        try:
            jax.profiler.stop_trace()
            if self._last < first:  # not one round was taken whole
                return
            times = RoundTimes(
                first=first,
                last=self._last,
                seconds=self._seconds,
                phases=self._phases | {OTHER_WORK: max(0.0, rest)},
            )
            write_text(self.folder / TIMES, times.model_dump_json(indent=2) + "\n")
        except (LockstepError, OSError, RuntimeError) as error:
            self._give_up(error)
            return
        for name, milliseconds, share in times.rows():
            log.info(f"train: profile: {name:<11} {milliseconds:9.1f} ms a round  {share:6.1%}")
        log.info(f"train: profile of rounds {first} to {self._last}: {self.folder}")

    def _give_up(self, error: Exception) -> None:
        self.rounds = None
        log.warning(f"train: warning: no profile: {brief(str(error), 200)}; training goes on")
