"""Trackers of runs: TensorBoard and Weights & Biases, each told of one training from one thread.

A training that was killed and resumed is one run of a tracker. Its transcript has all rounds up to
the checkpoint, so `open` returns up to which step a sink has them, -1 for none, and the rest is
logged again. What a sink raises ends the telling, no more.
"""

import json
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import expecting

Scalars = Mapping[str, float]
"""Numbers of a step, by names that all trackers share, such as `loss/train`."""


class TrackedRun(NamedTuple):
    """The training that a sink, such as TensorBoard, shows."""

    key: str  #: Key of its stage train, by which a tracker finds it again.
    name: str  #: What trackers call it: optimizer, size and key, as in distro-1.9M-18b4f5f188fd.
    project: str  #: The project, or experiment, that it belongs to.
    folder: Path  #: Where trackers that write files put them.
    settings: dict  #: Its run file, without what changes no result.
    step: int  #: Rounds that are behind it: those of the checkpoint that it resumes from.


class TensorBoardSink:
    """A sink of TensorBoard's event files below `tensorboard/<name>`, one for each start.

    A round is one event, flushed at once. A resumed training begins its file with the step that it
    resumes at, and TensorBoard then drops what earlier files have from that step on.
    """

    module = "tensorboardX"

    def open(self, run: TrackedRun) -> int:
        """Begin another event file, and return the last step of the earlier ones that is valid."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import text

        folder = run.folder / "tensorboard" / run.name
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.glob("events.out.tfevents.*"))
        last, now = min(run.step, _last_step(earlier)), time.time()
        # names sort by second and suffix, and TensorBoard reads them in that order
        self._events = EventsWriter(str(folder / "events"), f".{len(earlier):06}")
        self._write(last + 1, wall_time=now, session_log=SessionLog(status=SessionLog.START))
        if not earlier:  # four spaces make Markdown leave a line as it is
            lines = json.dumps(run.settings, indent=2).splitlines()
            markdown = "".join(f"    {line}\n" for line in lines)
            self._write(0, wall_time=now, summary=text("run_file", markdown))
        self._events.flush()
        return last

    def log(self, step: int, at: float, scalars: Scalars) -> None:
        """Write one event of TensorBoard, `at` a time in seconds since 1970.

        A step may come twice, or late: the scores of a task are computed while training goes on.
        """
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        values = [scalar(name, value).value[0] for name, value in scalars.items()]
        self._write(step, wall_time=at, summary=Summary(value=values))
        self._events.flush()

    def close(self, *, finished: bool) -> None:
        """Close TensorBoard's file, which does not say whether the training has `finished`."""
        self._events.close()

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(step=step, **content))


def _last_step(files: list[Path]) -> int:
    last = -1
    for event in (event for file in files for event in _events(file)):
        if event.HasField("session_log"):
            last = min(last, event.step - 1)
        elif event.HasField("summary"):
            last = max(last, event.step)
    return last


def _events(file: Path) -> Iterator[Any]:
    """Yield the events of TensorBoard's file; a kill may cut the last one."""
    from tensorboardX.proto.event_pb2 import Event

    data, at = file.read_bytes(), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length + 4
        if end > len(data):
            return
        yield Event.FromString(data[at + 12 : end - 4])
        at = end


class WandbSink:
    """A sink of Weights & Biases: a run whose id is the key; offline by default.

    Online, W&B resumes the run of that id. Offline it cannot: each start makes another folder, and
    what a killed one had not yet written is lost. So the folders of earlier starts are removed, and
    the new one is told everything again: `wandb sync` has one run to upload.
    """

    module = "wandb"

    def open(self, run: TrackedRun) -> int:
        """Begin or resume the run of W&B, and return its last step."""
        # read when it is imported: by itself, W&B tells its makers of every error
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_FINISH_TIMEOUT", "60")  # by itself, it waits without end
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        run.folder.mkdir(parents=True, exist_ok=True)
        if mode != "online":
            for folder in (run.folder / "wandb").glob(f"offline-run-*-{run.key}"):
                shutil.rmtree(folder)
        self._run = wandb.init(
            project=run.project,
            id=run.key,
            name=run.name,
            dir=run.folder,
            config=run.settings,
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off", finish_timeout_raises=True),
        )
        return self._run.step - 1

    def log(self, step: int, at: float, scalars: Scalars) -> None:
        """Log the numbers at their step, or the newest if that is past; W&B has its own clock."""
        self._run.log(dict(scalars), step=max(step, self._run.step))

    def close(self, *, finished: bool) -> None:
        """Write what is left to W&B, which calls a stopped run failed until it is resumed."""
        with expecting(self._run.settings.sync_dir, "all sent; `wandb sync` does it", TimeoutError):
            self._run.finish(exit_code=0 if finished else 1)


def leave() -> None:
    """End W&B's own process, if a sink began one: else ours waits without end for it at its end."""
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()


SINKS = {"tensorboard": TensorBoardSink, "wandb": WandbSink}
