"""Held-out losses while a run trains, and the end of a training that they show to diverge."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from lockstep.swarm.swarm import NotFiniteError
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from pipeline import runfile
from pipeline.language_model.held_out import MeanLoss


@dataclass
class HeldOutLosses(Observer):
    """Measures the held-out loss when it is due, and ends a training that it shows to diverge."""

    run: runfile.Run
    measure: Callable[[], MeanLoss | None]  # None where nothing is held out
    first: float | None  # what it was before the first round
    timed: Callable[[str], AbstractContextManager[None]]

    def took(self, entry: Entry) -> Entry:
        """Return the round with the held-out loss after it."""
        step = entry.round.step
        if step != self.run.config.total_steps and step % self.run.held_out.every:
            return entry
        with self.timed("held out"):
            loss = self.measure()
        factor = self.run.held_out.stop_above
        if loss is None:
            return entry
        if not loss.mean <= factor * self.first:
            raise NotFiniteError(
                f"held-out loss is {loss.mean:.3f} after round {step}, expected at most [held_out] "
                f"stop_above = {factor} times the {self.first:.3f} it began with"
            )
        return entry.model_copy(update={"held_out_loss": loss.mean, "held_out_stderr": loss.stderr})
