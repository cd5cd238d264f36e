"""Requests of a run's owner to its trainer: to pause the training, or to stop it."""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from lockstep.protocol.driver import RunProgress
from lockstep.swarm.checkpoints import Checkpoints
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from pipeline.monitor.monitor import Monitor

POLL_SECONDS = 0.2  # of a paused training, for the end of the pause
log = logging.getLogger(__name__)


class Stops(Observer):
    """Ends the process after a signal, once its last round is saved.

    Args:
      asked_to_stop: Returns the status to end with, or 0.
      checkpoints: Where the rounds are saved.
      last: The last round, after which the training ends by itself.
    """

    def __init__(self, asked_to_stop: Callable[[], int], checkpoints: Checkpoints, last: int):
        self.asked_to_stop, self.checkpoints, self.last = asked_to_stop, checkpoints, last
        self._status = 0

    def must_save(self, entry: Entry) -> bool:
        """Return whether the process is to end."""
        self._status = 0 if entry.round.step == self.last else self.asked_to_stop()
        return bool(self._status)

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """End the process, if a signal came before the round was saved."""
        del progress
        if self._status:
            self.stop(self._status, entry.round.step)

    def stop(self, status: int, step: int) -> None:
        """End the process; the newest checkpoint is of round `step`."""
        self.checkpoints.close()
        log.info(f"train: stopped after round {step}; the same command goes on")
        sys.exit(status)


@dataclass
class Pauses(Observer):
    """Waits while the run is paused; its checkpoint is saved already.

    monitor: Knows whether the owner wants a pause, and shows it. stops: Ends the process meanwhile,
      if it is asked to.
    """

    monitor: Monitor
    stops: Stops

    def begins(self, step: int, progress: RunProgress) -> None:
        """Wait until the owner resumes the run."""
        if not (progress.pausing and self.monitor.must_pause()):
            return
        log.info(f"train: paused after round {step - 1}; `lockstep resume` goes on")
        self.monitor.paused()
        while self.monitor.must_pause():
            if status := self.stops.asked_to_stop():
                self.stops.stop(status, step - 1)
            time.sleep(POLL_SECONDS)
        log.info("train: resumed")
        self.monitor.go_on()
