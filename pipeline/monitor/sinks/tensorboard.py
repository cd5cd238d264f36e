"""TensorBoard: event files below `tensorboard/<name>`, one for each start of the training."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.monitor.sinks.sink import Scalars, TrackedRun

FILES = "events.out.tfevents.*"


class TensorBoardSink:
    """Writes the event files that `tensorboard --logdir` reads; a `Sink`.

    A round is one event, flushed at once. A resumed training begins its file with the step that it
    resumes at, and TensorBoard then drops what earlier files have from that step on.
    """

    def open(self, run: TrackedRun) -> int:
        """Begin another event file, and return the last step of the earlier ones that is valid."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        folder = run.folder / "tensorboard" / run.name
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob(FILES))
        last, now = min(run.step, _last_step(earlier)), time.time()
        # names sort by second and suffix, and TensorBoard reads them in that order
        self._events = EventsWriter(str(folder / "events"), f".{len(earlier):06}")
        self._write(last + 1, wall_time=now, session_log=SessionLog(status=SessionLog.START))
        if not earlier:
            summary = _text("run_file", json.dumps(run.settings, indent=2))
            self._write(0, wall_time=now, summary=summary)
        self._events.flush()
        return last

    def log(self, step: int, at: float, scalars: Scalars) -> None:
        """Write one event."""
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        values = [scalar(name, value).value[0] for name, value in scalars.items()]
        self._write(step, wall_time=at, summary=Summary(value=values))
        self._events.flush()

    def close(self, *, finished: bool) -> None:
        """Close the file."""
        del finished  # an event file does not say
        self._events.close()

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(step=step, **content))


def _text(name: str, text: str) -> Any:
    """A summary that TensorBoard shows as text; four spaces make Markdown leave it as it is."""
    from tensorboardX.summary import text as text_summary

    return text_summary(name, "".join(f"    {line}\n" for line in text.splitlines()))


def _last_step(files: list[Path]) -> int:
    last = -1
    for file in files:
        for event in _events(file):
            if event.HasField("session_log"):
                last = min(last, event.step - 1)
            elif event.HasField("summary"):
                last = max(last, event.step)
    return last


def _events(file: Path) -> Iterator[Any]:
    """The events of a file: length, checksum, content, checksum; a kill may cut the last one."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length + 4
        if end > len(data):
            return
        yield Event.FromString(data[at + 12 : end - 4])
        at = end
