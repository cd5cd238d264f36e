"""A page that refreshes itself while a run trains. It is made of what the trainer writes anyway."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import write_text
from lockstep.tables.explain import validate_json
from lockstep.transcript import curves
from lockstep.transcript.curves import totals_of
from lockstep.transcript.entry import Entry, Header
from lockstep.transcript.transcript import Transcript
from parts.tasks import while_training
from pipeline.monitor import find, show, training
from pipeline.monitor.profile import times_of
from pipeline.monitor.training import Training
from pipeline.pages import plots
from pipeline.pages.stage_results import read_text_tsv
from pipeline.pages.templates import fill
from pipeline.stage import signals

PAGE, TEMPLATE = "data/live.html", "live.html.jinja"
POLL_SECONDS = 0.2
TILES = ("state", "round", "rate", "left", "loss", "sent")


class Recorded(NamedTuple):
    """What a training has recorded so far.

    Attributes:
      rows: A row of each of its rounds.
      before: The transcript's header; None until there is one.
      scores: Lines of its tasks.tsv.
    """

    rows: list[dict]
    before: Header | None
    scores: list[dict[str, str]]


class GrowingRows:
    """The rows of a transcript that grows, each line of it read once."""

    def __init__(self, folder: Path):
        self.before = Transcript(folder).header
        self.file = folder / "rounds.jsonl"
        self._start_over(0)

    def read(self) -> list[dict]:
        """Return the rows of the rounds that are there; a resumed training has fewer than before.

        Raises:
          LockstepError: A line is not a valid entry.
        """
        with open(self.file, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # another file: cut back to a checkpoint
                self._start_over(inode)
            file.seek(self._at)
            lines = file.read().split(b"\n")[:-1]  # the last one may not be whole
        for line in lines:
            entry = validate_json(Entry, line, str(self.file))
            self.rows.append(self._totals.row(entry))
            self._at += len(line) + 1
        return self.rows

    def _start_over(self, inode: int) -> None:
        self._totals, self._inode, self._at = totals_of(self.before.run), inode, 0
        self.rows: list[dict] = []


def watch(root: Path, page: Path, every: float) -> None:
    """Write the page anew, each time after `every` seconds, until the training ends, or Ctrl-C.

    Raises:
      LockstepError: There is no training in progress.
    """
    seen = training.newest(root)
    print(f"report: {page}, anew every {every:g} s; Ctrl-C ends it, and not the training")
    growing, recorded = None, Recorded([], None, [])
    with signals.stopping() as asked_to_stop:
        while not asked_to_stop():
            try:
                seen = training.read(seen.folder)
                growing = growing or GrowingRows(seen.folder / "transcript")
                recorded = Recorded(growing.read(), growing.before, _scores(seen.folder))
                write_text(page, render(seen, recorded, every))
            except (FileNotFoundError, LockstepError):  # not begun, or over
                if not seen.folder.exists():
                    break
            until = time.monotonic() + every
            while time.monotonic() < until and not asked_to_stop() and seen.folder.exists():
                time.sleep(POLL_SECONDS)
    if not seen.folder.exists():
        write_text(page, render(seen, _final(root, seen.folder.name) or recorded, None))
        print(f"report: training {seen.folder.name} is over")


def render(seen: Training, recorded: Recorded, every: float | None) -> str:
    """Return the page; a browser loads it again after `every` seconds, or never if it is None."""
    rows, scores = recorded.rows, recorded.scores
    losses, held_out = curves.trained(rows), curves.held_out(rows, recorded.before)
    said = dict(show.rows(seen)) if every else {"round": f"{len(rows)} rounds", "state": "over"}
    return fill(
        TEMPLATE,
        title=f"Lockstep run {seen.folder.name}",
        every=every,
        tiles=[(name, said.pop(name)) for name in TILES if name in said],
        rest=list(said.items()),
        pictures=plots.curve_pictures(losses, held_out) if losses else [],
        scores=list({(line["task"], line["metric"]): line for line in scores}.values()),
        of_scores=plots.training_scores_picture(scores),
        times=times_of(seen.folder.parent, seen.folder.name),
    )


def _final(root: Path, key: str) -> Recorded | None:
    """What a training left, if it has ended."""
    with suppress(LockstepError, OSError):
        ended = find.finished(root)
        if ended and ended.key == key:
            growing = GrowingRows(ended.transcript)
            scores = _scores(ended.files[find.TRAINED].parent)
            return Recorded(growing.read(), growing.before, scores)
    return None


def _scores(folder: Path) -> list[dict[str, str]]:
    file = folder / while_training.FILE
    return read_text_tsv(file) if file.is_file() else []
