"""A simulation in progress: its rounds, and what survives a kill."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_json
from lockstep.machine import allocator
from lockstep.machine.progress import Progress
from lockstep.optim.optimizer import Tree
from lockstep.programs.train_step import Programs
from lockstep.protocol.driver import RunProgress
from lockstep.simulation.arguments import Arguments
from lockstep.simulation.examples import ExampleSet, PeerData
from lockstep.simulation.measurements import Measurements
from lockstep.simulation.micro_batch import fits_into_memory, largest
from lockstep.simulation.result import Curves, Log, Result
from lockstep.swarm.checkpoints import Checkpoints, Saved
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.fused_peers import make_peers
from lockstep.swarm.round_settings import RoundSettings
from lockstep.swarm.swarm import NotFiniteError, Swarm
from lockstep.swarm.training_loop import Record, Start, TrainingLoop
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from lockstep.transcript.rounds_file import RoundsFile
from lockstep.transcript.state import State

KEPT = 2  # checkpoints, the newest
ASKED_FOR = "simulation.json"  # beside them, the settings


class Kept:
    """The checkpoints of a simulation in a folder, if any, and its arguments.

    `settings` are those that must be the same where a simulation goes on, as JSON, besides "steps".
    """

    def __init__(self, folder: Path | None, every: int, settings: dict):
        self.folder, self.settings = folder, json.loads(json.dumps(settings, default=str))
        remedy = "take another checkpoint_dir"
        self.record = Record(
            RoundsFile(folder / "rounds.jsonl", remedy) if folder else None,
            Checkpoints(folder, KEPT) if folder else None,
            every,
        )

    def newest(self, like: State) -> Saved | None:
        """Return the newest checkpoint, if there is one.

        Raises:
          LockstepError: It is of a simulation with other arguments.
        """
        if not self.folder:
            return None
        steps, file = self.settings["steps"], self.folder / ASKED_FOR
        if not any(path.name.isdigit() for path in self.folder.iterdir()):  # named by round
            write_json(file, self.settings)
        elif other := _difference(self.settings, read_json(file) | {"steps": steps}):
            name, here, there = other
            raise LockstepError(
                f"simulate: {name} is {here!r}, expected {there!r} as in the checkpoints in "
                f"{self.folder}; go on with the same arguments, or take another checkpoint_dir"
            )
        saved = self.record.checkpoints.newest(like)
        if saved and saved.step > steps:
            raise LockstepError(
                f"simulate: steps is {steps}, expected at least {saved.step}, the rounds of the "
                f"checkpoint in {self.folder}"
            )
        return saved


class Problem(NamedTuple):
    """What is simulated: programs of a `LossTask`, from these params, measured on `held_out`."""

    asked: Arguments
    settings: RoundSettings
    programs: Programs
    data_of_peers: list[PeerData]
    held_out: ExampleSet | None
    params: Tree


@dataclass
class _Told(Observer):
    """Shows progress, tells `on_round`, and keeps the micro-batch for a simulation that goes on."""

    measurements: Measurements
    micro_batch: int
    bar: Progress | None
    on_round: Callable[[dict], None] | None

    def saves(self) -> dict:
        return {"micro_batch": self.micro_batch}

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        if self.bar:
            self.bar.advance(**self.measurements.shown())
        if self.on_round:
            self.on_round(dict(self.measurements.log.curves.train[-1]))


def take_rounds(
    problem: Problem,
    kept: Kept,
    log: Log,
    on_round: Callable[[dict], None] | None,
    *,
    show_progress: bool,
) -> Result:
    """Take the remaining rounds, and return the result; `on_round` is called with each row."""
    asked, settings, programs, data_of_peers, held_out, params = problem
    own, shared = jax.device_get(programs.init(params))
    start = Start(State(params, shared, (own,) * asked.peers), 0, 0)
    with ExitStack() as stack:
        stack.enter_context(allocator.trimming())
        saved = kept.newest(start.state)
        settings = _with_micro_batch(problem, saved)
        begun = kept.record.begin(start, settings, saved)
        peers = make_peers(programs, asked.layout, begun.state, jax.devices(), begun.absent)
        rest = begun.rest or {"curves": {}, "ejected": {}}
        log.begin(Curves(**rest["curves"]))
        measurements = Measurements(asked, peers, held_out, log, begun.step)
        measurements.ejected = {int(peer): tuple(why) for peer, why in rest["ejected"].items()}
        if kept.record.checkpoints:
            stack.enter_context(kept.record.checkpoints)
        bar = None
        if show_progress:
            bar = Progress("simulate", total=asked.steps, unit="round", start=begun.step)
            stack.enter_context(bar)
        if not begun.step:
            measurements.measure()
        faults = FaultSchedule(asked.faults, asked.seed, programs.form)
        swarm = Swarm(settings, peers, data_of_peers.__getitem__, faults)
        observers = [measurements, _Told(measurements, settings.micro_batch, bar, on_round)]
        training = TrainingLoop(swarm, begun, kept.record, asked.steps, observers, name="simulate")
        try:
            training.take_rounds()
        except NotFiniteError as error:
            raise LockstepError(
                f"simulate: {error}, expected a finite number; try a lower learning_rate"
            ) from error
    restored = programs.task.nesting.restored
    return Result(
        params=restored(peers.params()),
        local_params=tuple(restored(local) for local in measurements.local_params()),
        curves=log.curves,
        micro_batch=settings.micro_batch,
        fired=dict(faults.fired),
        ejected=measurements.ejected,
    )


def _with_micro_batch(problem: Problem, saved: Saved | None) -> RoundSettings:
    """The settings with the given micro-batch, else the earlier one, else one that fits."""
    asked, settings, programs, data_of_peers, *_ = problem
    if asked.micro_batch is not None:
        return settings
    if saved:
        return replace(settings, micro_batch=saved.rest["micro_batch"])
    rows_N = data_of_peers[0].take(np.arange(asked.batch_size))
    fits = partial(fits_into_memory, programs, asked.peers, rows_N)
    return replace(settings, micro_batch=largest(fits, asked.batch_size))


def _difference(here: dict, there: dict, path: str = "") -> tuple[str, object, object] | None:
    """Return the first setting that differs: its name, and both values."""
    for name in sorted(here.keys() | there.keys()):
        one, other = here.get(name), there.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            if found := _difference(one, other, f"{path}{name}."):
                return found
        elif one != other:
            return f"{path}{name}", one, other
    return None
