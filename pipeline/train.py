"""Stage train: peers take rounds until total_steps -> data/trained, metrics/train.json.

Work in progress is in data/runs/<key>: the growing transcript, and checkpoints. Killed at any
moment and started again, the stage ends with the same bytes.
"""

import logging
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import jax
import numpy as np

from pipeline import runfile
from pipeline.carrier.launch import remote_peers
from pipeline.errors import LockstepError
from pipeline.monitor.monitor import Monitor
from pipeline.monitor.profile import Profile
from pipeline.monitor.sinks import tracker
from pipeline.programs import cudnn, held_out
from pipeline.programs.optimizers import learning_rate_of_run
from pipeline.protocol.round import Round
from pipeline.stage import allocator, artifacts, devices, signals
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.progress import Progress
from pipeline.swarm import begin, in_time
from pipeline.swarm.begin import Setup, make_peers, repeats_bit_for_bit
from pipeline.swarm.faults import FaultSchedule
from pipeline.swarm.peers import RunningPeers
from pipeline.swarm.swarm import NotFiniteError, Swarm, Taken
from pipeline.tasks import while_training
from pipeline.tokens.ids import check_ids
from pipeline.tokens.shards import Shards, read_shards
from pipeline.transcript import curves
from pipeline.transcript.entry import TABLES, Entry, Header
from pipeline.transcript.follow import follow
from pipeline.transcript.state import State
from pipeline.transcript.transcript import Transcript, Writer
from pipeline.weights import epochs
from pipeline.weights.checkpoints import Checkpoints

POLL_SECONDS = 0.2  # of a paused training, for the end of the pause
log = logging.getLogger(__name__)

WEIGHTS = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")  # in a snapshot


def run(run: runfile.Run, paths: Paths) -> None:
    """Train data/init on data/shards, resuming from this key's newest checkpoint."""
    init, shards = paths.need("convert"), paths.need("download")
    devices.keep_compiled(paths.store / "compiled")
    allocator.trim_after_compiling()
    tracker.check(run)
    cudnn.check(run, artifacts.read_json(init / "hf" / "config.json"))
    _check_kind(run, shards, read_shards(shards))
    setup = begin.read(run, init, shards)
    _check_tokens(setup, shards)
    if late := in_time.check(run, setup.programs):
        log.warning(f"train: {late}")
    held_out_NW, _ = held_out.read(run, shards)
    if not len(held_out_NW):
        log.warning("train: nothing is held out, so no held-out loss is measured")

    with ExitStack() as stack:
        training = _Training(setup, paths, held_out_NW, stack)
        training.prepare()
        training.take_rounds()

    transcript = Transcript(training.writer.folder)
    rows = curves.rows(transcript)
    metrics = curves.metrics(rows, transcript, setup.start.state.params)
    with paths.building() as folder:
        # hard links: no bytes are copied, and a kill before the end leaves the source whole
        shutil.copytree(transcript.folder, folder / "transcript", copy_function=artifacts.link)
        shutil.copytree(init / "hf", folder / "hf", ignore=WEIGHTS)
        curves.write(
            rows,
            transcript.header.held_out_loss,
            learning_rate_of_run(run, setup.start.step),
            folder / METRICS,
        )
        shutil.copy(training.scores.path, folder / METRICS / while_training.FILE)
        artifacts.write_json(folder / METRICS / "train.json", metrics)
        artifacts.write_json(folder / "final.json", curves.final(transcript))
    shutil.rmtree(paths.scratch)


class _Training:
    """A training in progress, and what a kill must not lose of it."""

    def __init__(self, setup: Setup, paths: Paths, held_out_NW: np.ndarray, stack: ExitStack):
        self.setup, self.paths, self.held_out_NW, self.stack = setup, paths, held_out_NW, stack
        self.run = run = setup.run
        self.applied = in_time.Watch(run.config.max_round_train_time)
        self.faults = FaultSchedule(run.faults.schedule, run.peers.seed, setup.programs.form)
        self.checkpoints = Checkpoints(paths.scratch / "checkpoints", run.runtime.keep_steps)
        self.writer = Writer(
            paths.scratch / "transcript",
            run.snapshots(setup.start.step),
            keep_payloads=setup.programs.form.kept,
        )

    def prepare(self) -> None:
        """Restore the newest checkpoint and follow the transcript up to it, or begin."""
        run, setup, start = self.run, self.setup, self.setup.start
        saved = self.checkpoints.newest(start.state)
        self.step = saved.step if saved else start.step
        state = saved.state if saved else start.state
        entries = self.writer.cut(self.step)
        self.progress = follow(
            start.progress(setup.settings),
            entries,
            self.writer.rounds,
            stores=setup.settings.stores_epochs,
        )
        self.peers = self._make_peers(state, saved.rest["absent"] if saved else ())
        self.stack.callback(self.peers.close)
        self.scores = while_training.of_run(run, setup.hf_config, self.paths)
        self.stack.callback(self.scores.close)
        if saved:
            self._check_environment()
            log.info(f"train: resumes after round {self.step}")
            self.faults.restore(saved.rest["faults"])
            self.scores.resume(self.step)
        else:
            held_out_loss = self._measure()
            self._check_start(start.state, held_out_loss)
            self.writer.header(
                Header(
                    key=self.paths.key,
                    run=run.model_dump(mode="json", include=TABLES),
                    model=setup.hf_config,
                    environment=devices.describe(run.peers.processes),
                    bitwise=repeats_bit_for_bit(setup),
                    held_out_loss=held_out_loss,
                )
            )
            self.writer.snapshot(self.step, start.state)
            self.scores.begin()
            self.scores.take(self.step, self.peers.params)
        self.header = Transcript(self.writer.folder).header
        losses = (entry.held_out_loss for entry in reversed(entries))
        measured = (loss for loss in losses if loss is not None)
        self.monitor = Monitor(
            run,
            self.paths.run,
            self.paths.scratch,
            self.step,
            next(measured, self.header.held_out_loss),
            lambda: self.scores.rows,
        )
        self.profile = self.stack.enter_context(Profile(run, self.paths.scratch))
        self.swarm = Swarm(
            setup.settings,
            self.peers,
            lambda _: setup.data,
            self.faults,
            must_pause=self.monitor.must_pause,
            timed=self.profile.timed,
        )
        self._say_where()

    def take_rounds(self) -> None:
        """Take rounds until the last; on a request to stop, save and end the process."""
        run = self.run
        bar = Progress("train", total=run.config.total_steps, unit="round", start=self.step)
        with signals.stopping() as asked_to_stop, self.checkpoints, bar, self.monitor:
            self._wait_if_paused(asked_to_stop)
            while taken := self._take_round():
                self.applied.took(taken.entry)
                self.step = taken.entry.round.step
                last = self.step == run.config.total_steps
                measured = None
                if last or self.step % run.held_out.every == 0:
                    with self.profile.timed("held out"):
                        measured = self._measure()
                    self._check_divergence(measured)
                taken = taken._replace(
                    entry=taken.entry.model_copy(update={"held_out_loss": measured})
                )
                with self.profile.timed("score"):
                    self.scores.take(self.step, self.peers.params, last=last)
                status = 0 if last else asked_to_stop()
                stored = bool(taken.entry.checkpointed)
                pausing = self.progress.pausing
                self._keep(taken, save=last or pausing or stored or bool(status))
                if stored and run.export.every_epoch:
                    self._push(taken.entry.round)
                with self.profile.timed("tell"):
                    self.monitor.took(self.progress, taken.entry)
                self.profile.end(self.step)
                if status:
                    self._stop(status)
                self._say_who(taken.entry)
                bar.advance(**self.monitor.fields)
                self._wait_if_paused(asked_to_stop)
        for kind in dict.fromkeys(fault.kind for fault in run.faults.schedule):
            log.info(f"train: fault {kind} fired {self.faults.fired[kind]} times")

    def _push(self, last: Round) -> None:
        """Push the params that end an epoch; its last round is saved already."""
        epochs.push(
            self.run,
            self.paths.key,
            self.peers.state().params,
            last,
            init=self.paths.out("convert"),
            shards=self.paths.out("download"),
            aside=self.paths.scratch / "epoch",
        )

    def _wait_if_paused(self, asked_to_stop: Callable[[], int]) -> None:
        """Wait while the run's owner wants it paused; the checkpoint is saved already."""
        if not (self.progress.pausing and self.monitor.must_pause()):
            return
        log.info(f"train: paused after round {self.step}; `lockstep resume` goes on")
        self.monitor.paused()
        while self.monitor.must_pause():
            if status := asked_to_stop():
                self._stop(status)
            time.sleep(POLL_SECONDS)
        log.info("train: resumed")
        self.monitor.go_on()

    def _stop(self, status: int) -> NoReturn:
        """End the process as it was asked to; the newest checkpoint is of the last round."""
        self.checkpoints.close()
        log.info(f"train: stopped after round {self.step}; the same command goes on")
        sys.exit(status)

    def _take_round(self) -> Taken | None:
        self.profile.begin(self.step + 1)
        try:
            self.progress, taken = self.swarm.take_round(self.progress)
        except NotFiniteError as error:
            raise self._stopped(str(error)) from error
        return taken

    def _keep(self, taken: Taken, *, save: bool) -> None:
        """Append the round to the transcript, and take the snapshot and checkpoint that are due."""
        run = self.run
        with self.profile.timed("transcript"):
            self.writer.round(taken.entry, taken.payloads, taken.others)
        snapshot = self.writer.snapshots.takes(self.step)
        checkpoint = save or self.step % run.runtime.checkpoint_every == 0
        if not (save or self._state_is_due(self.step)):
            return
        with self.profile.timed("fetch state"):
            state = self.peers.state()
        if bad := state.not_finite():  # a loss shows neither a momentum's NaN nor the last round's
            raise self._stopped(f"{bad[0]} is not finite after round {self.step}")
        if snapshot:
            with self.profile.timed("snapshot"):
                self.writer.snapshot(self.step, state)
        if checkpoint:
            with self.profile.timed("checkpoint"):
                self.scores.wait()
                self.writer.flush()  # a checkpoint that outlives a power cut finds its rounds
                # the transcript has the coordinator's state; these are facts about the peers
                rest = {"faults": self.faults.to_json(), "absent": sorted(self.peers.absent)}
                self.checkpoints.save(self.step, state, rest)

    def _make_peers(self, state: State, absent: Sequence[int]) -> RunningPeers:
        run, programs = self.run, self.setup.programs
        if run.runtime.carrier == "in_process":
            return make_peers(programs, run.peers.layout, state, jax.devices(), absent)
        return remote_peers(self.setup, state, self.paths.scratch, self._state_is_due, absent)

    def _state_is_due(self, step: int) -> bool:
        """Whether a snapshot or a checkpoint is taken after a step."""
        return self.writer.snapshots.takes(step) or step % self.run.runtime.checkpoint_every == 0

    def _measure(self) -> float | None:
        if not len(self.held_out_NW):
            return None
        size, columns = self.run.peers.micro_batch, self.setup.programs.task.columns
        return held_out.mean_loss(self.peers.measure, self.held_out_NW, size, columns)

    def _check_start(self, state: State, loss: float | None) -> None:
        bad = state.not_finite()
        if loss is not None and not np.isfinite(loss):
            bad.append("the held-out loss")
        if bad:
            raise LockstepError(
                f"{self.paths.out('convert')}: {bad[0]} is not finite before the first round, "
                "expected weights, and numbers in config.json, that give one in float32"
            )

    def _check_divergence(self, loss: float | None) -> None:
        before, factor = self.header.held_out_loss, self.run.held_out.stop_above
        if loss is not None and not loss <= factor * before:
            raise self._stopped(
                f"held-out loss is {loss:.3f} after round {self.step}, expected at most "
                f"[held_out] stop_above = {factor} times the {before:.3f} it began with"
            )

    def _stopped(self, reason: str) -> LockstepError:
        return LockstepError(
            f"train: diverged: {reason}; the last good checkpoint is kept in "
            f"{self.paths.scratch / 'checkpoints'}; try a lower base_lr or a longer warm-up"
        )

    def _check_environment(self) -> None:
        """A run resumed elsewhere would not end with the bytes of a run that was never killed."""
        began = Transcript(self.writer.folder).header.environment
        if found := devices.difference(began, self.run.peers.processes):
            name, here, expected = found
            raise LockstepError(
                f"{self.paths.scratch}: {name} is {here!r} here, expected {expected!r} as where "
                "this run began; resume it there, or start over after `lockstep clean`"
            )

    def _say_who(self, entry: Entry) -> None:
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

    def _say_where(self) -> None:
        for peer in range(self.run.peers.count):
            log.info(f"train: peer {peer} runs on {self.peers.where(peer)}")
        peers = self.run.peers
        equal = self.header.bitwise and peers.layout == "each" and peers.processes == 1
        device = self.header.environment["device_kind"]
        how = "bit for bit" if equal else "within a tolerance"
        log.info(f"train: attention by {peers.attention}, in {peers.precision}")
        log.info(f"train: on {device}, layout {peers.named_layout}: an audit replays {how}")


def _check_kind(run: runfile.Run, shards: Path, listed: Shards) -> None:
    if run.llm.data_type == "Finetuning" and "labels" not in listed.columns:
        raise LockstepError(
            f"model.LLM.data_type: Finetuning: {shards} has no labels to train on, expected "
            "Pretraining, or Preprocessed data with labels"
        )
    length = listed.source.get("row_tokens", run.llm.max_seq_len)  # only Preprocessed has rows
    if length != run.llm.max_seq_len:
        raise LockstepError(
            f"model.LLM.max_seq_len is {run.llm.max_seq_len}, expected {length}, the tokens of a "
            f"row of {listed.source['read']}"
        )


def _check_tokens(setup: Setup, shards: Path) -> None:
    run, start, found = setup.run, setup.start, len(setup.data)
    needed = run.config.last_index(run.llm.max_seq_len, start.step, start.data_index)
    if needed > found:
        raise LockstepError(
            f"{shards}: {found} sequences of {run.llm.max_seq_len} tokens, expected {needed} "
            f"for [config] total_steps = {run.config.total_steps}; no sequence is trained on twice"
        )
    known, vocab_size = read_shards(shards).vocab_size, setup.hf_config["vocab_size"]
    if known is not None and known > vocab_size:
        log.warning(
            f"train: warning: the tokenizer in {shards} has {known} tokens, and the model "
            f"{vocab_size}: token ids beyond the model's vocabulary are rejected when read"
        )
    check_ids(shards, vocab_size, run.llm.max_seq_len)
