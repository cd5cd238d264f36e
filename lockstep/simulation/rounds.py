"""A simulation in progress: its rounds, what is measured between them, and what survives a kill."""

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
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
from lockstep.optim.transform import OptimizerState, lookahead_params
from lockstep.programs.device_memory import device_memory
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from lockstep.protocol.driver import RoundSettings, RunProgress
from lockstep.simulation.arguments import Arguments
from lockstep.simulation.counting import CountingSwarm
from lockstep.simulation.examples import ExampleSet, PeerData
from lockstep.simulation.planning import BLOCKS, PlanningSwarm
from lockstep.simulation.result import Curves, Log, Result
from lockstep.swarm.checkpoints import Checkpoints, Saved
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import SimulatedPeers, make_peers
from lockstep.swarm.scanned_peers import ScannedPeers
from lockstep.swarm.swarm import NotFiniteError
from lockstep.swarm.training_loop import Record, Start, StartingPoint, TrainingLoop, Watch
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from lockstep.transcript.state import State
from lockstep.transcript.transcript import RoundsFile

MEASURED_AT_ONCE = 256  # examples of `eval_data`


class Measurements(Observer):
    """Measures a simulation after `step` rounds, on `held_out`, and adds to the curves of `log`."""

    def __init__(
        self,
        arguments: Arguments,
        peers: SimulatedPeers,
        held_out: ExampleSet | None,
        log: Log,
        step: int,
    ):
        self.arguments, self.peers, self.held_out, self.log = arguments, peers, held_out, log
        self.step = step
        self.ejected: dict[int, tuple[int, str]] = {}
        self._lookahead = jax.jit(partial(lookahead_params, peers.programs.optimizer))

    def begins(self, step: int, progress: RunProgress) -> None:
        """Note when a simulated round begins."""
        self._began = time.monotonic()

    def took(self, entry: Entry) -> Entry:
        """Add a simulated round to the curves, and what is measured after it."""
        seconds, curves = time.monotonic() - self._began, self.log.curves
        self.step = entry.round.step
        for peer, reason in entry.decision.ejected.items():
            self.ejected[peer] = self.step, reason
        previous = curves.train[-1] if curves.train else {}
        sizes = [message.bytes for message in entry.evidence.messages.values()]
        peers, sequences = self.arguments.peers, entry.round.sequences
        sent, received = links.traffic(self.arguments.links.topology, sizes, peers)
        increments = {
            "examples": sum(sequences[peer] for peer in entry.decision.applied),
            "bytes_up": sent / peers,
            "bytes_down": received / peers,
            "link_seconds": entry.decision.train_seconds,
            "seconds": seconds,
        }
        totals = {name: previous.get(name, 0) + value for name, value in increments.items()}
        applied = len(entry.decision.applied)
        self.log.add("train", {"step": self.step, "loss": entry.loss, "applied": applied, **totals})

        if self._correlates(self.step):
            self.log.add("correlation", {"step": self.step, "correlation": self._correlation()})
        if self._measures(self.step):
            self.measure()
        return entry

    def reads(self, step: int) -> bool:
        """Return whether params or states are read after a simulated round."""
        return self._correlates(step) or (self.held_out is not None and self._measures(step))

    def _correlates(self, step: int) -> bool:
        every = self.arguments.correlation_every
        return every is not None and step % every == 0

    def _measures(self, step: int) -> bool:
        return step == self.arguments.steps or step % self.arguments.eval_every == 0

    def saves(self) -> dict:
        """Return a simulation's curves, and who was ejected, for its checkpoint."""
        return {"ejected": self.ejected, "curves": asdict(self.log.curves)}

    def measure(self) -> None:
        """Measure a simulation's loss on held-out examples: of the params, and of local ones."""
        if self.held_out is None:
            return
        loss = local = averaged = self._mean_loss(self.peers.params_and_shared()[0])
        if not self._together:
            first, *others = self.local_params()
            local = self._mean_loss(first)
            total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), others, first)
            averaged = self._mean_loss(jax.tree.map(lambda x: x / self.arguments.peers, total))
        row = {"step": self.step, "loss": loss, "local_loss": local, "averaged_loss": averaged}
        self.log.add("validation", row)

    def local_params(self) -> Iterator[Tree]:
        """Yield where each simulated peer takes its next gradient: NumPy arrays."""
        params, shared = self.peers.params_and_shared()
        taken = np.int32(self.step * self.peers.programs.optimizer.inner_steps)
        if self._together:
            yield from [jax.tree.map(np.array, params)] * self.arguments.peers
            return
        for peer in range(self.arguments.peers):
            state = OptimizerState(taken, self.peers.own(peer), shared)
            local = self._lookahead(params, state)
            yield jax.tree.map(np.array, local)

    def shown(self) -> dict[str, str]:
        """Return what the simulated rounds' bar shows."""
        curves = self.log.curves
        row, measured = curves.train[-1], curves.validation[-1:]
        return {
            "loss": "-" if row["loss"] is None else f"{row['loss']:.4f}",
            "eval": f"{measured[0]['loss']:.4f}" if measured else "-",
            "sent_per_peer": f"{row['bytes_up'] / 1e3:,.1f} kB",
        }

    def _mean_loss(self, params: Tree) -> float:
        total, counted, size = 0.0, 0.0, self.held_out.count
        for first in range(0, size, MEASURED_AT_ONCE):
            index_N = np.arange(first, min(first + MEASURED_AT_ONCE, size))
            measured = self.peers.programs.steps.measure(params, self.held_out.take(index_N))
            # a loss may be a sum and the number of what counts in it
            n = len(index_N)
            loss, count = measured if isinstance(measured, tuple) else (float(measured) * n, n)
            total, counted = total + float(loss), counted + float(count)
        return total / (counted or 1)

    def _correlation(self) -> float | None:
        """Return Pearson's correlation of simulated local params, mean over pairs; else None."""
        count = self.arguments.peers
        if count < 2:
            return None
        rows = [
            np.concatenate([x.ravel() for x in jax.tree.leaves(local)])
            for local in self.local_params()
        ]
        matrix = np.corrcoef(np.stack(rows))
        return float((matrix.sum() - np.trace(matrix)) / (count * (count - 1)))

    @property
    def _together(self) -> bool:
        """Return whether simulated peers take their gradients at the agreed params."""
        return not self.peers.programs.optimizer.looks_ahead


def largest(fits: Callable[[int], bool], batch_size: int) -> int:
    """Return the largest micro-batch of a simulated round that fits: batch_size, its half, ..."""
    size = batch_size
    while not fits(size):
        if size == 1:
            raise LockstepError(
                "simulate: batch_size: a step on a single example does not fit into memory, "
                "expected a smaller model or fewer peers"
            )
        size = -(-size // 2)
    return size


def fits_into_memory(
    programs: Programs,
    peers: int,
    rows_N: Tree,
    size: int,
    limit: int | None = None,
    copies: int = 0,
) -> bool:
    """Return whether all simulated peers fit into memory at the worst moment of a round.

    XLA states what a compiled program allocates, so nothing is tried that could fail half-way or
    have the process killed. The programs that are compiled here are those that train. `rows_N` are
    those of one peer's local step, `size` of them a micro-batch. `limit` is in bytes; by default it
    is that of a device, or of this machine where devices are its processors. `copies` of the state
    of all peers are kept besides.
    """
    lots = programs.optimizer.inner_steps
    most = lots * len(jax.tree.leaves(rows_N)[0])
    work = programs.work(jax.tree.map(lambda x: x[:1], rows_N), most, size)
    try:
        planned = device_memory(programs, peers, work)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return False
        raise
    if planned is None:
        return True
    kept = copies * (planned.agreed + peers * planned.own)
    return planned.needed + kept <= (limit or planned.limit)


KEPT_CHECKPOINTS = 2  # checkpoints, the newest
ASKED_FOR = "simulation.json"  # beside them, the settings


class SavedSimulation:
    """The checkpoints of a simulation in a folder, if any, and its arguments.

    `settings` are those that must be the same where a simulation goes on, as JSON, besides "steps".
    """

    def __init__(self, folder: Path | None, every: int, settings: dict):
        self.folder, self.settings = folder, json.loads(json.dumps(settings, default=str))
        remedy = "take another checkpoint_dir"
        rounds = checkpoints = None
        if folder:
            committed = settings["layout"] != "rounds"  # whose messages do not come to the host
            rounds = RoundsFile(folder / "rounds.jsonl", remedy, committed=committed)
            checkpoints = Checkpoints(folder, KEPT_CHECKPOINTS)
        self.record = Record(rounds, checkpoints, every)

    def newest(self, like: State) -> Saved | None:
        """Return the simulation's newest checkpoint, if there is one."""
        if not self.folder:
            return None
        steps, file = self.settings["steps"], self.folder / ASKED_FOR
        if not any(path.name.isdigit() for path in self.folder.iterdir()):  # named by round
            write_json(file, self.settings)
        elif difference := _difference(self.settings, read_json(file) | {"steps": steps}):
            name, value, expected = difference
            raise LockstepError(
                f"simulate: {name} is {value!r}, expected {expected!r} as in the checkpoints in "
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
    """What is simulated in rounds: programs of a `LossTask`, params, and what is measured."""

    arguments: Arguments
    settings: RoundSettings
    programs: Programs
    data_of_peers: list[PeerData]
    held_out: ExampleSet | None
    params: Tree


@dataclass
class _ProgressReporter(Observer):
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


def take_rounds(problem: Problem, saved: SavedSimulation, log: Log) -> Result:
    """Take the remaining rounds of a simulation, and return the result."""
    args, settings, programs, data_of_peers, held_out, params = problem
    own, shared = jax.device_get(programs.init(params))
    fresh = Start(State(params, shared, (own,) * args.peers), 0, 0)
    with ExitStack() as stack:
        stack.enter_context(allocator.keeping())
        newest = saved.newest(fresh.state)
        settings = _with_micro_batch(problem, newest)
        start = saved.record.begin(fresh, settings, newest)
        peers = _peers(args.layout, programs, start)
        observed = start.extras or {"curves": {}, "ejected": {}}
        log.begin(Curves(**observed["curves"]))
        measurements = Measurements(args, peers, held_out, log, start.step)
        measurements.ejected = {int(peer): tuple(why) for peer, why in observed["ejected"].items()}
        if saved.record.checkpoints:
            stack.enter_context(saved.record.checkpoints)
        bar = None
        if args.show_progress:
            bar = Progress("simulate", total=args.steps, unit="round", start=start.step)
            stack.enter_context(bar)
        if not start.step:
            measurements.measure()
        faults = FaultSchedule(args.faults, args.seed, programs.form)
        swarm = _swarm(problem, settings, peers, faults, saved.record, measurements)
        observers = [
            Watch(settings.closing.limit, "simulate"),
            measurements,
            _ProgressReporter(measurements, settings.micro_batch, bar, args.on_round),
        ]
        training = TrainingLoop(swarm, start, saved.record, args.steps, observers)
        try:
            training.take_rounds()
        except NotFiniteError as error:
            raise LockstepError(f"simulate: {error}; {_known(problem, log.curves)}") from error
    restored = programs.task.nesting.restored
    return Result(
        params=restored(peers.params()),
        local_params=tuple(restored(local) for local in measurements.local_params()),
        curves=log.curves,
        micro_batch=settings.micro_batch,
        fired=dict(faults.fired),
        ejected=measurements.ejected,
    )


def _peers(layout: str, programs: Programs, start: StartingPoint) -> SimulatedPeers:
    """Return the simulation's peers of a layout, where they start."""
    if layout == "rounds":
        return ScannedPeers(programs, start.state, jax.devices(), start.absent)
    return make_peers(programs, layout, start.state, jax.devices(), start.absent)


def _swarm(
    problem: Problem,
    settings: RoundSettings,
    peers: SimulatedPeers,
    faults: FaultSchedule,
    record: Record,
    measurements: Measurements,
) -> CountingSwarm:
    """Return the simulation's swarm of these peers; of scanned ones it plans rounds ahead."""
    data_of, recorded = problem.data_of_peers.__getitem__, record.asked(problem.programs.form)
    if not isinstance(peers, ScannedPeers):
        return CountingSwarm(settings, peers, data_of, faults, recorded=recorded)

    def is_read(step: int) -> bool:
        return measurements.reads(step) or record.state_is_due(step)

    last = problem.arguments.steps
    parts = settings, peers, data_of, faults
    return PlanningSwarm(*parts, last=last, is_read=is_read, recorded=recorded)


def _known(problem: Problem, curves: Curves) -> str:
    """Return what a simulation knows of why losses or gradients are not finite."""
    given = {"params": problem.params}
    for data in problem.data_of_peers:
        rows = np.arange(min(problem.settings.closing.most_rows, data.examples.count))
        given[data.examples.name] = data.take(rows).examples
    for name, tree in given.items():
        for leaf in jax.tree.leaves(tree):
            if not (finite := np.isfinite(leaf)).all():
                return f"{name} holds {np.asarray(leaf)[~finite][0]}, expected finite numbers"
    for row in curves.train[::-1]:
        return f"the loss of round {row['step']} was {row['loss']}; try a lower learning_rate"
    if problem.programs.lots.steps > 1:
        return "params and examples are finite; try a lower learning_rate for the local steps"
    return (
        "no step was taken before, and params and examples are finite: expected a loss_fn of them"
    )


def _with_micro_batch(problem: Problem, saved: Saved | None) -> RoundSettings:
    """Return simulation settings with the micro-batch: given, earlier, or one that fits."""
    args, settings, programs, data_of_peers, *_ = problem
    if args.micro_batch is not None:
        return settings
    if saved:
        return replace(settings, micro_batch=saved.extras["micro_batch"])
    rows_N = data_of_peers[0].take(np.arange(args.batch_size))
    copies = BLOCKS if args.layout == "rounds" else 0
    fits = partial(fits_into_memory, programs, args.peers, rows_N, copies=copies)
    return replace(settings, micro_batch=largest(fits, args.batch_size))


def _difference(new: dict, old: dict, path: str = "") -> tuple[str, object, object] | None:
    """Return the first setting in which a resumed simulation differs: name and both values."""
    for name in sorted(new.keys() | old.keys()):
        value, expected = new.get(name), old.get(name)
        if isinstance(value, dict) and isinstance(expected, dict):
            if difference := _difference(value, expected, f"{path}{name}."):
                return difference
        elif value != expected:
            return f"{path}{name}", value, expected
    return None
