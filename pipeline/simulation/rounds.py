"""A simulation in progress: its rounds, what is measured between them, and what a kill keeps."""

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree, looks_ahead
from pipeline.optim.transform import next_step
from pipeline.programs.train_step import Programs
from pipeline.protocol.driver import RunProgress
from pipeline.simulation.examples import ExampleSet, PeerData
from pipeline.simulation.micro_batch import fits_into_memory, largest
from pipeline.simulation.result import Curves, Log, Result
from pipeline.stage import allocator
from pipeline.stage.artifacts import read_json, write_json
from pipeline.stage.progress import Progress
from pipeline.swarm import in_time
from pipeline.swarm.begin import Start, make_peers
from pipeline.swarm.faults import FaultSchedule
from pipeline.swarm.round_settings import RoundSettings
from pipeline.swarm.swarm import NotFiniteError, Swarm, Taken
from pipeline.transcript.follow import follow
from pipeline.transcript.rounds_file import RoundsFile
from pipeline.transcript.state import State
from pipeline.weights.checkpoints import Checkpoints, Saved

MEASURED_AT_ONCE = 256  # examples of `eval_data`
KEPT = 2  # checkpoints, the newest
ASKED_FOR = "simulation.json"  # beside them, the settings


class Kept:
    """The checkpoints of a simulation, and all that it was asked for.

    Args:
      folder: Where checkpoints are; None keeps none.
      every: Rounds between them.
      settings: What must be the same where a simulation goes on, as JSON, besides "steps".
    """

    def __init__(self, folder: Path | None, every: int, settings: dict):
        self.folder, self.every = folder, every
        self.settings = json.loads(json.dumps(settings, default=str))
        self.checkpoints = Checkpoints(folder, KEPT) if folder else None
        remedy = "take another checkpoint_dir"
        self.rounds = RoundsFile(folder / "rounds.jsonl", remedy) if folder else None

    def newest(self, like: State) -> Saved | None:
        """Return the newest checkpoint, if there is one.

        Raises:
          LockstepError: It is of a simulation with other arguments.
        """
        if not self.checkpoints:
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
        saved = self.checkpoints.newest(like)
        if saved and saved.step > steps:
            raise LockstepError(
                f"simulate: steps is {steps}, expected at least {saved.step}, the rounds of the "
                f"checkpoint in {self.folder}"
            )
        return saved


class Simulation:
    """A simulation in progress.

    Args:
      run: The run that it is.
      programs: Its programs, of a `LossTask`.
      of_peers: The data of each peer.
      held_out: What the loss is measured on, or None.
      kept: Its checkpoints.
      steps: Its last round.
    """

    def __init__(
        self,
        run: runfile.Run,
        programs: Programs,
        of_peers: list[PeerData],
        held_out: ExampleSet | None,
        kept: Kept,
        steps: int,
    ):
        self.run, self.programs, self.of_peers, self.held_out = run, programs, of_peers, held_out
        self.kept, self.steps = kept, steps
        self.faults = FaultSchedule(run.faults.schedule, run.peers.seed, programs.form)
        self.ejected: dict[int, tuple[int, str]] = {}
        self.lookahead = jax.jit(programs.optimizer.lookahead)

    def take_rounds(
        self,
        params: Tree,
        log_dir: Path | None,
        on_round: Callable[[dict], None] | None,
        *,
        show_progress: bool,
    ) -> Result:
        """Take the rounds that are left, and return the result.

        Args:
          params: Params to begin with, nested dicts.
          log_dir: Where curves are written, or None.
          on_round: Called with each row of the curve "train".
          show_progress: Whether progress is shown.
        """
        total, every, applied = (
            self.steps,
            self.kept.every,
            in_time.Watch(self.run.config.max_round_train_time),
        )
        with ExitStack() as stack:
            stack.enter_context(allocator.trimming())
            progress, curves = self._begin(params)
            self.log = Log(log_dir, self.kept.settings, curves)
            if self.kept.checkpoints:
                stack.enter_context(self.kept.checkpoints)
            if show_progress:
                bar = Progress("simulate", total=total, unit="round", start=self.step)
                stack.enter_context(bar)
            if not self.step:
                self._measure()
            while self.step < total:
                began = time.monotonic()
                progress, taken = self._take_round(progress)
                applied.took(taken.entry)
                self._add(taken, time.monotonic() - began)
                if self.kept.checkpoints:
                    self.kept.rounds.append(taken.entry)
                    if self.step % every == 0 or self.step == total:
                        self._save()
                if show_progress:
                    bar.advance(**self._shown())
                if on_round:
                    on_round(dict(self.log.curves.train[-1]))
        restored = self.programs.task.nesting.restored
        return Result(
            params=restored(jax.tree.map(np.array, self._params)),
            local_params=tuple(restored(local) for local in self._local_params()),
            curves=self.log.curves,
            micro_batch=self.run.peers.micro_batch,
            fired=dict(self.faults.fired),
            ejected=self.ejected,
        )

    def _begin(self, params: Tree) -> tuple[RunProgress, Curves]:
        """Begin, or go on from the newest checkpoint."""
        own, shared = jax.device_get(self.programs.init(params))
        start = Start(State(params, shared, (own,) * self.run.peers.count), 0, 0)
        saved = self.kept.newest(start.state)
        self._choose_micro_batch(saved and saved.rest["micro_batch"])
        state = saved.state if saved else start.state
        self.step = saved.step if saved else 0
        absent = saved.rest.get("absent", ()) if saved else ()  # release 0.1 did not say
        layout = self.run.peers.layout
        self.peers = make_peers(self.programs, layout, state, jax.devices(), absent)
        settings = RoundSettings.of(self.run)
        self.swarm = Swarm(settings, self.peers, self.of_peers.__getitem__, self.faults)
        progress, rounds = start.progress(settings), self.kept.rounds
        if rounds:
            progress = follow(progress, rounds.cut(self.step), rounds)
        if not saved:
            return progress, Curves()
        self.faults.restore(saved.rest["faults"])
        self.ejected = {int(peer): tuple(why) for peer, why in saved.rest["ejected"].items()}
        return progress, Curves(**saved.rest["curves"])

    def _choose_micro_batch(self, before: int | None) -> None:
        """Take the micro-batch that was asked for, or the one from before, or what fits."""
        peers, batch_size = self.run.peers, self.run.peers.micro_batch
        if self.kept.settings["micro_batch"] is None:
            rows_N = self.of_peers[0].take(np.arange(batch_size))
            fits = functools.partial(fits_into_memory, self.programs, peers.count, rows_N)
            size = before or largest(fits, batch_size)
            peers = peers.model_copy(update={"micro_batch": size})
            self.run = self.run.model_copy(update={"peers": peers})

    def _take_round(self, progress: RunProgress) -> tuple[RunProgress, Taken]:
        try:
            progress, taken = self.swarm.take_round(progress)
        except NotFiniteError as error:
            raise LockstepError(
                f"simulate: {error}, expected a finite number; try a lower learning_rate"
            ) from error
        return progress, taken

    def _add(self, taken: Taken, seconds: float) -> None:
        """Add the round to the curves, and what is measured after it."""
        entry, curves = taken.entry, self.log.curves
        self.step = entry.round.step
        for peer, why in entry.decision.ejected.items():
            self.ejected[peer] = self.step, why
        before = curves.train[-1] if curves.train else {}
        sent = sum(map(len, taken.payloads.values()))
        peers, sequences = self.run.peers.count, entry.round.sequences
        more = {
            "examples": sum(sequences[peer] for peer in entry.decision.applied),
            "bytes_up": sent / peers,
            "bytes_down": sent * (peers - 1) / peers,
            "link_seconds": entry.decision.train_seconds,
            "seconds": seconds,
        }
        so_far = {name: before.get(name, 0) + value for name, value in more.items()}
        applied = len(entry.decision.applied)
        row = {"step": self.step, "loss": entry.loss, "applied": applied, **so_far}
        self.log.add("train", row)

        every, settings = self.kept.settings["correlation_every"], self.kept.settings
        if every and self.step % every == 0:
            self.log.add("correlation", {"step": self.step, "correlation": self._correlation()})
        if self.step == self.steps or self.step % settings["eval_every"] == 0:
            self._measure()

    def _measure(self) -> None:
        """Measure the loss on the held-out examples: of the params, and of local ones."""
        if self.held_out is None:
            return
        loss = local = averaged = self._mean_loss(self._params)
        if not self._together:
            first, *others = self._local_params()
            local = self._mean_loss(first)
            mean = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), others, first)
            averaged = self._mean_loss(jax.tree.map(lambda x: x / len(self.of_peers), mean))
        row = {"step": self.step, "loss": loss, "local_loss": local, "averaged_loss": averaged}
        self.log.add("validation", row)

    def _mean_loss(self, params: Tree) -> float:
        total, count = 0.0, self.held_out.count
        for first in range(0, count, MEASURED_AT_ONCE):
            index_N = np.arange(first, min(first + MEASURED_AT_ONCE, count))
            loss = self.programs.measure(params, self.held_out.take(index_N))
            total += float(loss) * len(index_N)
        return total / count

    def _correlation(self) -> float | None:
        """Pearson's correlation of two peers' local params, mean over pairs; None of one peer."""
        count = len(self.of_peers)
        if count < 2:
            return None
        rows = [
            np.concatenate([x.ravel() for x in jax.tree.leaves(local)])
            for local in self._local_params()
        ]
        matrix = np.corrcoef(np.stack(rows))
        return float((matrix.sum() - np.trace(matrix)) / (count * (count - 1)))

    @property
    def _params(self) -> Tree:
        return next(iter(self.peers.params_on.values()))

    @property
    def _together(self) -> bool:
        """Whether peers take their gradients at the params themselves."""
        return not looks_ahead(self.programs.optimizer)

    def _local_params(self) -> Iterator[Tree]:
        """Where each peer takes its next gradient: NumPy arrays."""
        params, optimizer = self._params, self.programs.optimizer
        shared = self.peers.shared
        step = next_step(optimizer, np.int32(self.step * optimizer.inner_steps))
        if self._together:
            yield from [jax.tree.map(np.array, params)] * len(self.of_peers)
            return
        for peer in range(len(self.of_peers)):
            local = self.lookahead(params, self.peers.own(peer), shared, step)
            yield jax.tree.map(np.array, local)

    def _save(self) -> None:
        rest = {
            "micro_batch": self.run.peers.micro_batch,
            "faults": self.faults.to_json(),
            "ejected": self.ejected,
            "absent": sorted(self.peers.absent),
            "curves": asdict(self.log.curves),
        }
        state = self.peers.state()
        if bad := state.not_finite():
            raise LockstepError(
                f"simulate: {bad[0]} is not finite after round {self.step}, expected numbers; try "
                "a lower learning_rate"
            )
        self.kept.rounds.flush()  # a checkpoint that outlives a power cut finds them
        self.kept.checkpoints.save(self.step, state, rest)

    def _shown(self) -> dict[str, str]:
        curves = self.log.curves
        row, measured = curves.train[-1], curves.validation[-1:]
        return {
            "loss": "-" if row["loss"] is None else f"{row['loss']:.4f}",
            "eval": f"{measured[0]['loss']:.4f}" if measured else "-",
            "sent_per_peer": f"{row['bytes_up'] / 1e3:,.1f} kB",
        }


def _difference(here: dict, there: dict, path: str = "") -> tuple[str, object, object] | None:
    """The first setting that is another: its name, and both."""
    for name in sorted(here.keys() | there.keys()):
        one, other = here.get(name), there.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            if found := _difference(one, other, f"{path}{name}."):
                return found
        elif one != other:
            return f"{path}{name}", one, other
    return None
