"""Stage train: peers take rounds until total_steps -> data/trained, metrics/train.json.

Work in progress is in data/runs/<key>: the growing transcript, and checkpoints. Killed at any
moment and started again, the stage ends with the same bytes.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from lockstep.errors import DivergedError, LockstepError
from lockstep.files import link, write_json
from lockstep.machine import allocator
from lockstep.machine.progress import Progress
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.checkpoints import Checkpoints
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import RunningPeers, make_peers
from lockstep.swarm.swarm import NotFiniteError
from lockstep.swarm.training_loop import Record, StartingPoint, TrainingLoop
from lockstep.transcript import curves
from lockstep.transcript.entry import TABLES, Entry, Header
from lockstep.transcript.observer import Observer
from lockstep.transcript.state import State
from lockstep.transcript.transcript import Transcript, Writer
from pipeline import runfile
from pipeline.joints import Joint
from pipeline.language_model import cudnn, held_out
from pipeline.language_model.held_out import HeldOutRows, MeanLoss
from pipeline.monitor import tracker, training_scores
from pipeline.monitor.held_out_losses import HeldOutLosses
from pipeline.monitor.monitor import Monitor, Pauses, Stops, Terminal
from pipeline.monitor.profile import Profile
from pipeline.monitor.training_scores import TrainingScores
from pipeline.runfile.method import learning_rate_of_run
from pipeline.stage import devices, signals
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.start import in_time, set_up
from pipeline.start.set_up import Setup, repeats_bit_for_bit
from pipeline.start.site import site_of
from pipeline.subject import subject_of
from pipeline.weights import upload

log = logging.getLogger(__name__)

WEIGHTS = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")  # in a snapshot
REMEDY = "try a lower base_lr or a longer warm-up"
BEFORE = "no step was taken before; expected a model whose loss and gradients are finite"


def run(run: runfile.Run, paths: Paths) -> None:
    """Train data/init on data/shards, resuming from this key's newest checkpoint."""
    init, shards = paths.need("convert"), paths.need("download")
    devices.keep_compiled(paths.store / "compiled")
    allocator.trim_after_compiling()
    tracker.check(run)
    setup = set_up.read_to_train(run, init, shards)
    cudnn.check(run, setup.model)
    if late := in_time.check(run, setup.programs):
        log.warning(f"train: {late}")
    held = held_out.read(run, shards)
    if not len(held.rows_NW):
        log.warning("train: nothing is held out, so no held-out loss is measured")

    paths.match_scratch()
    with ExitStack() as stack:
        stack.callback(setup.programs.steps.by.close)
        scores = _train(setup, paths, held, stack)

    transcript = Transcript(paths.scratch / "transcript")
    rows = curves.rows(transcript)
    metrics = curves.metrics(rows, transcript, setup.start.state.params, run.llm.inner_steps)
    with paths.building() as folder:
        # hard links: no bytes are copied, and a kill before the end leaves the source whole
        shutil.copytree(transcript.folder, folder / "transcript", copy_function=link)
        if (signed := paths.scratch / "signed").is_dir():  # in a run over a store
            shutil.copytree(signed, folder / "signed", copy_function=link)
        if (init / "hf").is_dir():  # a workload has none
            shutil.copytree(init / "hf", folder / "hf", ignore=WEIGHTS)
        curves.write(
            rows, transcript.header, learning_rate_of_run(run, setup.start.step), folder / METRICS
        )
        shutil.copy(scores, folder / METRICS / training_scores.FILE)
        write_json(folder / METRICS / "train.json", metrics)
        write_json(folder / "final.json", curves.final(transcript))
    shutil.rmtree(paths.scratch)


def _train(setup: Setup, paths: Paths, held: HeldOutRows, stack: ExitStack) -> Path:
    """Take all rounds, from the newest checkpoint on; return the file of scores during training."""
    run, programs, scratch = setup.run, setup.programs, paths.scratch
    site = site_of(setup)
    writer = Writer(scratch / "transcript", run.snapshots(site.start.step))
    checkpoints = Checkpoints(scratch / "checkpoints", run.runtime.keep_steps)
    profile = stack.enter_context(Profile(run, scratch))
    record = Record(writer, checkpoints, run.runtime.checkpoint_every, profile.timed)
    beginning = record.begin(site.start, setup.settings, checkpoints.newest(site.start.state))
    peers = _make_peers(setup, beginning, scratch, record.state_is_due)
    stack.callback(peers.close)
    scores = _scores_of_tasks(setup, paths)
    stack.callback(scores.close)
    measure = _measurement(setup, peers, held.rows_NW)
    if beginning.extras is None:
        _write_beginning(setup, paths, writer, measure(), held)
        scores.begin()
        scores.take(beginning.step, peers.params)
    else:
        _check_environment(setup, scratch)
        log.info(f"train: resumes after round {beginning.step}")
        scores.resume(beginning.step)
    beginning = site.begin(beginning, peers, writer)
    header = Transcript(writer.folder).header
    _say_where(run, peers, header)

    losses = (entry.held_out_loss for entry in reversed(beginning.entries))
    latest = next((loss for loss in losses if loss is not None), header.held_out_loss)
    monitor = Monitor(run, paths.run, scratch, beginning.step, latest, lambda: scores.rows)
    faults = FaultSchedule(run.faults.schedule, run.peers.seed, programs.form)
    swarm = site.swarm(
        setup.settings, peers, lambda _: setup.data, faults,
        must_pause=monitor.must_pause, timed=profile.timed, spool=scratch,
        recorded=record.asked(programs.form),
    )  # fmt: skip
    bar = Progress("train", total=run.config.total_steps, unit="round", start=beginning.step)
    with signals.stopping() as asked_to_stop, checkpoints, bar, monitor:
        stops = Stops(asked_to_stop, checkpoints, run.config.total_steps)
        observers = [
            Pauses(monitor, stops),
            HeldOutLosses(run, measure, header.held_out_loss, profile.timed),
            _Scores(scores, peers, run.config.total_steps, profile.timed),
            _EpochPushes(run, peers, paths),
            Terminal(bar, monitor, profile.timed),
            profile,
            stops,
            *site.observers,
        ]
        training = TrainingLoop(swarm, beginning, record, run.config.total_steps, observers)
        try:
            training.take_rounds()
        except NotFiniteError as error:
            trained = training.step > setup.start.step or programs.lots.steps > 1
            known = f"the last good checkpoint is kept in {checkpoints.folder}; {REMEDY}"
            raise DivergedError(
                f"train: diverged: {error}; {known if trained else BEFORE}"
            ) from error
    for kind in dict.fromkeys(fault.kind for fault in run.faults.schedule):
        log.info(f"train: fault {kind} fired {faults.fired[kind]} times")
    return scores.path


class OffersPeers(Protocol):
    """Peers in processes of their own."""

    def start_peers(
        self,
        setup: Setup,
        state: State,
        scratch: Path,
        keeps: Callable[[int], bool],
        absent: Sequence[int],
    ) -> RunningPeers:
        """Start the peers with a state; `keeps` says after which rounds it may be asked for."""


class OffersScores(Protocol):
    """Scores of tasks while a run trains."""

    def training_scores(
        self, run: runfile.Run, hf_config: dict[str, Any], paths: Paths
    ) -> TrainingScores:
        """Return the scores of a run's training, which has `[evaluate] every`."""


REMOTE_PEERS = Joint[OffersPeers]("remote_peers")
SCORES = Joint[OffersScores]("while_training")


def _make_peers(
    setup: Setup, beginning: StartingPoint, scratch: Path, state_is_due: Callable[[int], bool]
) -> RunningPeers:
    run = setup.run
    if run.runtime.in_one_process:
        layout, programs = run.peers.layout, setup.programs
        return make_peers(programs, layout, beginning.state, jax.devices(), beginning.absent)
    (part,) = REMOTE_PEERS  # whose keys of [runtime] say so
    return part.start_peers(setup, beginning.state, scratch, state_is_due, beginning.absent)


def _scores_of_tasks(setup: Setup, paths: Paths) -> TrainingScores:
    """Return what scores tasks during training; its file stays empty without `[evaluate] every`."""
    every = setup.run.evaluate.every
    if not every:
        return TrainingScores(paths.scratch / training_scores.FILE)
    for part in SCORES:
        return part.training_scores(setup.run, setup.model, paths)
    raise LockstepError(f"[evaluate] every = {every}, expected 0: parts/tasks is not here")


@dataclass
class _Scores(Observer):
    """Scores tasks while the model trains."""

    scores: TrainingScores
    peers: RunningPeers
    last: int
    timed: Callable[[str], AbstractContextManager[None]]

    def took(self, entry: Entry) -> Entry:
        """Score the trained params after a round, if that is due."""
        step = entry.round.step
        with self.timed("score"):
            self.scores.take(step, self.peers.params, last=step == self.last)
        return entry

    def saves(self) -> dict:
        """Wait for the scores of earlier rounds of training: a checkpoint expects them written."""
        self.scores.wait()
        return {}


@dataclass
class _EpochPushes(Observer):
    """Pushes the trained params that end an epoch, if `[export] every_epoch` asks for it."""

    run: runfile.Run
    peers: RunningPeers
    paths: Paths

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Push the params of an epoch's last round, which is saved already."""
        if entry.checkpointed and self.run.export.every_epoch:
            upload.push_epoch(self.run, self.paths, self.peers.state().params, entry.round)


def _measurement(
    setup: Setup, peers: RunningPeers, held_out_NW: np.ndarray
) -> Callable[[], MeanLoss | None]:
    """Return what measures the held-out loss at the peers' params."""
    programs, params = setup.programs, setup.start.state.params
    if not len(held_out_NW) or not programs.steps.by.measures:
        return lambda: None
    weights_N = setup.subject.row_weights(programs, params, held_out_NW)
    size = setup.run.peers.micro_batch
    return partial(held_out.mean_loss, peers.measure, held_out_NW, size, weights_N)


def _write_beginning(
    setup: Setup, paths: Paths, writer: Writer, loss: MeanLoss | None, held: HeldOutRows
) -> None:
    """Begin the transcript: its header, and the snapshot before the first round."""
    run, state = setup.run, setup.start.state
    bad = state.not_finite()
    if loss is not None and not np.isfinite(loss.mean):
        bad.append("the held-out loss")
    if bad:
        raise LockstepError(
            f"{paths.out('convert')}: {bad[0]} is not finite before the first round, "
            "expected weights, and numbers in config.json, with which it is finite in float32"
        )
    bitwise = repeats_bit_for_bit(setup)
    writer.header(
        Header(
            key=paths.key,
            run=run.model_dump(mode="json", include=TABLES),
            model=setup.model,
            environment=setup.environment(run.peers.processes),
            bitwise=bitwise,
            held_out_loss=None if loss is None else loss.mean,
            held_out_stderr=None if loss is None else loss.stderr,
            held_out_rows=None if loss is None else (len(held.rows_NW), held.split_size),
        )
    )
    writer.snapshot(setup.start.step, state)


def _check_environment(setup: Setup, scratch: Path) -> None:
    """Check that training resumes where it began: elsewhere it ends with other bytes."""
    began = Transcript(scratch / "transcript").header.environment
    if difference := devices.difference(setup.environment(setup.run.peers.processes), began):
        name, value, expected = difference
        raise LockstepError(
            f"{scratch}: {name} is {value!r} here, expected {expected!r} as where "
            "this run began; resume it there, or start over after `lockstep clean`"
        )


def _say_where(run: runfile.Run, peers: RunningPeers, header: Header) -> None:
    for peer in sorted(peers.living):
        log.info(f"train: peer {peer} runs on {peers.where(peer)}")
    device, layout = jax.devices()[0].device_kind, run.peers.named_layout
    how = "replays bit for bit" + (", on any machine" if run.peers.bits == "everywhere" else "")
    if why := devices.never_comparable(run, repeats=subject_of(run).repeats(run)):
        how = f"cannot compare a step: {why}"
    elif not header.bitwise:
        how = "cannot compare a step, since this machine does not repeat one bit for bit"
    log.info(f"train: {subject_of(run).computed_by(run, header.model, header.environment)}")
    log.info(f"train: on {device}, layout {layout}: an audit {how}")
