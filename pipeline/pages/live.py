"""A page that refreshes itself while a run trains. It is made of what the trainer writes anyway."""

import os
import time
from contextlib import suppress
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.monitor import show, training
from pipeline.monitor.profile import times_of
from pipeline.monitor.training import Training
from pipeline.pages import plots
from pipeline.pages.report import fill
from pipeline.runfile.explain import validate_json
from pipeline.stage import signals
from pipeline.stage.artifacts import read_json, write_text
from pipeline.stage.keys import OUT
from pipeline.transcript import curves
from pipeline.transcript.curves import Totals
from pipeline.transcript.entry import Entry
from pipeline.transcript.transcript import Transcript

PAGE, TEMPLATE = "data/live.html", "live.html.jinja"
POLL_SECONDS = 0.2
TILES = ("state", "round", "rate", "left", "loss", "sent")


class GrowingRows:
    """The rows of a transcript that grows, each line of it read once.

    Args:
      folder: Folder of the transcript.
    """

    def __init__(self, folder: Path):
        run = Transcript(folder).header.run
        self.file = folder / "rounds.jsonl"
        self._length, self._peers = run["model"]["LLM"]["max_seq_len"], run["peers"]["count"]
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
        self._totals, self._inode, self._at = Totals(self._length, self._peers), inode, 0
        self.rows: list[dict] = []


def watch(root: Path, page: Path, every: float) -> None:
    """Write the page again and again until the training has ended, or Ctrl-C.

    Args:
      root: The folder where `data/` lies.
      page: The page.
      every: Seconds between two versions of it.

    Raises:
      LockstepError: There is no training in progress.
    """
    seen = training.newest(root)
    print(f"report: {page}, anew every {every:g} s; Ctrl-C ends it, and not the training")
    growing = None
    with signals.stopping() as asked_to_stop:
        while not asked_to_stop():
            try:
                seen = training.read(seen.folder)
                growing = growing or GrowingRows(seen.folder / "transcript")
                write_text(page, render(seen, growing.read(), every))
            except (FileNotFoundError, LockstepError):  # not begun, or over
                if not seen.folder.exists():
                    break
            until = time.monotonic() + every
            while time.monotonic() < until and not asked_to_stop() and seen.folder.exists():
                time.sleep(POLL_SECONDS)
    if not seen.folder.exists():
        write_text(page, render(seen, _final_rows(root, seen.folder.name, growing), None))
        print(f"report: training {seen.folder.name} is over")


def render(seen: Training, rows: list[dict], every: float | None) -> str:
    """Return the page.

    Args:
      seen: The training.
      rows: A row of each of its rounds.
      every: Seconds after which a browser loads it again; None: the training is over.
    """
    losses, held_out = (curves.measured(rows, name) for name in ("loss", "held_out"))
    said = dict(show.rows(seen)) if every else {"round": f"{len(rows)} rounds", "state": "over"}
    return fill(
        TEMPLATE,
        title=f"Lockstep run {seen.folder.name}",
        every=every,
        tiles=[(name, said.pop(name)) for name in TILES if name in said],
        rest=list(said.items()),
        pictures=plots.curve_pictures(losses, held_out) if losses else [],
        times=times_of(seen.folder.parent, seen.folder.name),
    )


def _final_rows(root: Path, key: str, growing: GrowingRows | None) -> list[dict]:
    """All rows of a training that has ended, if it left them; else those that were seen."""
    trained = root / OUT["train"] / "transcript"
    with suppress(LockstepError, OSError):
        if read_json(trained / "header.json")["key"] == key:
            return GrowingRows(trained).read()
    return growing.rows if growing else []
