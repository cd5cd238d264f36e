"""What a training shows in the terminal: its bar, and a line for each peer that comes or goes."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from lockstep.protocol.driver import RunProgress
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from pipeline.monitor.monitor import Monitor
from pipeline.stage.progress import Progress

log = logging.getLogger(__name__)


@dataclass
class Terminal(Observer):
    """Tells the monitor and the terminal of each round.

    bar: Its numbers are the monitor's. timed: Returns a block whose time counts for a phase of the
      round.
    """

    bar: Progress
    monitor: Monitor
    timed: Callable[[str], AbstractContextManager[None]]

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Tell of a round that is on record."""
        with self.timed("tell"):
            self.monitor.took(progress, entry)
        _say_who(entry)
        self.bar.advance(**self.monitor.fields)


def _say_who(entry: Entry) -> None:
    """Log the peers that left the run or joined it."""
    step = entry.round.step
    for peer, why in entry.decision.ejected.items():
        log.info(f"train: round {step}: peer {peer} is ejected: {why}")
    for peer in entry.decision.dropped:
        log.info(f"train: round {step}: nobody heard from peer {peer}; it leaves the epoch")
    for peer in entry.left:
        log.info(f"train: round {step}: peer {peer} has left")
    for peer in entry.round.joined:
        log.info(f"train: round {step}: peer {peer} has joined")
