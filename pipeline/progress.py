"""Progress of a stage: one live bar in a terminal, plain lines anywhere else."""

import sys
import time
from types import TracebackType

PLAIN_SECONDS = 5.0  # between two plain lines: a log is for reading


class Progress:
    """Shows how far a stage is; `with Progress("train", total=200, unit="round") as bar: ...`.

    Args:
      title: the stage's name.
      total: how many units the whole is.
      unit: what is counted: rounds, files, bytes.
      start: how many are done already, for work that goes on.
    """

    def __init__(self, title: str, *, total: int, unit: str, start: int = 0):
        self.title, self.total, self.unit, self.done = title, total, unit, start
        self._last_line = time.monotonic()
        self._bar = None

    def __enter__(self) -> "Progress":
        if sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn(self.unit),
                TextColumn("{task.fields[said]}"),
                TimeRemainingColumn(),
            )
            self._bar.start()
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=self.done, said=""
            )
        return self

    def advance(self, count: int = 1, **fields: object) -> None:
        """Counts `count` more units, and shows the fields as `name value` beside them."""
        self.done += count
        said = "  ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items())
        if self._bar:
            self._bar.update(self._task, completed=self.done, said=said)
        elif (now := time.monotonic()) - self._last_line > PLAIN_SECONDS or self.done == self.total:
            self._last_line = now
            line = f"{self.title}: {self.unit} {self.done}/{self.total}  {said}"
            print(line.rstrip(), flush=True)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        if self._bar:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
