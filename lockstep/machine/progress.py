"""Progress of a stage: one live bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from threading import Lock
from types import TracebackType
from typing import Any

PLAIN_SECONDS = 5.0  # between two plain lines, so that a log stays readable
BRIEF_SECONDS = 1.0  # transfers shorter than this are not shown


def size(count: float) -> str:
    """Return a number of bytes as text for a progress bar, in powers of 1000: 34.1 kB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


class Progress:
    """Shows the progress of a stage: `with Progress("train", total=200, unit="round") as bar: ...`.

    Bytes are shown in larger units, with their rate; brief transfers are not shown. Resumed work
    has `start` units done already.
    """

    def __init__(self, title: str, *, total: int, unit: str, start: int = 0):
        self.title, self.total, self.unit, self.done = title, total, unit, start
        self._start, self._began = start, time.monotonic()
        self._last_line = self._began
        self._bar, self._counting = None, Lock()

    def __enter__(self) -> "Progress":
        if sys.stdout.isatty():
            self._bar = self._make_bar()
            self._task = self._bar.add_task(
                self.title, total=self.total, completed=self.done, text=""
            )
            if self.unit != "byte":
                self._bar.start()
        return self

    def advance(self, count: int = 1, **fields: object) -> None:
        """Count `count` more units of progress, and show the fields as `name value` beside them."""
        now = time.monotonic()
        with self._counting:  # called from several threads
            self.done += count
        text = "  ".join(f"{name.replace('_', ' ')} {value}" for name, value in fields.items())
        if self._bar:
            self._bar.update(self._task, completed=self.done, text=text)
            if not self._bar.live.is_started and now - self._began > BRIEF_SECONDS:
                self._bar.start()
        elif now - self._last_line > PLAIN_SECONDS or self._ends():
            self._last_line = now
            print(f"{self._line(now)}  {text}".rstrip(), flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._bar and self._bar.live.is_started:
            self._bar.stop()

    def _make_bar(self) -> Any:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar
        from rich.text import Text

        class BarOverText(Bar):
            """A progress bar, and below it the fields, which may need more than a line."""

            def get_renderables(self) -> Iterator[Any]:
                yield from super().get_renderables()
                yield from (Text(task.fields["text"]) for task in self.tasks if task.fields["text"])

        count_columns = (MofNCompleteColumn(), TextColumn(self.unit))
        if self.unit == "byte":
            count_columns = (DownloadColumn(), TransferSpeedColumn())
        return BarOverText(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            *count_columns,
            TimeRemainingColumn(),
        )

    def _ends(self) -> bool:
        """Return whether the last line of progress is due; bytes have one only after an earlier."""
        shown = self.unit != "byte" or self._last_line != self._began
        return shown and self.done == self.total

    def _line(self, now: float) -> str:
        if self.unit != "byte":
            return f"{self.title}: {self.unit} {self.done}/{self.total}"
        scale, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        rate = (self.done - self._start) / (now - self._began)
        return (
            f"{self.title}: {self.done / scale:.1f}/{self.total / scale:.1f} {name}  "
            f"{rate / 1e6:.0f} MB/s"
        )
