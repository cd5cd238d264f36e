"""A part of a round taken by its operations, from the state that a transcript gives."""

from collections.abc import Callable, Sequence, Set
from copy import copy
from dataclasses import replace
from typing import Any, NoReturn

import jax
import numpy as np

from lockstep.errors import LockstepError
from lockstep.protocol.attestation import Hash
from lockstep.protocol.round import Round
from lockstep.same_bits.evaluation import same_bits
from lockstep.swarm.faults import FaultSchedule
from lockstep.transcript.entry import TABLES
from lockstep.transcript.transcript import Transcript
from parts.bits.by_operation import by_operation
from parts.bits.record import BitsRecord, PartOfRound, Recorder
from pipeline import runfile
from pipeline.audit.replay import Replay, WindowReplay
from pipeline.stage import devices
from pipeline.stage.keys import digest
from pipeline.start.set_up import Setup
from pipeline.weights import hf
from pipeline.weights.fresh import fresh_params

ANYWHERE = {"layout", "threads"}  # keys of [peers] that change no bit of a run by rules
STEP = ("params", "own", "shared", "rows", "count", "step")
MERGE = ("messages", "peers", "params", "shared", "step")


def key_of(setup: Setup, tables: Set[str]) -> Hash:
    """Return the hash of what a recording depends on: tables that change bits, and the model."""
    run = setup.run.model_dump(mode="json", include={*tables})
    run["peers"] = {key: value for key, value in run["peers"].items() if key not in ANYWHERE}
    return digest({"run": run, "model": setup.model})


class _RecordedError(Exception):
    """The part of the round was recorded: nothing after it is needed."""


class Recording:
    """The recording of one part of a round of a run."""

    def __init__(
        self, setup: Setup, of: PartOfRound, step: int, peer: int, *, as_peer: bool = False
    ):
        """Record `of` a round; `as_peer` by the programs of the peer, with its fault if it has one.

        Raises:
          LockstepError: The run has no such part that can be recorded.
        """
        self.setup, self.of, self.step, self.peer = setup, of, step, peer
        run, self.programs = setup.run, setup.programs
        if as_peer:
            faults = FaultSchedule(run.faults.schedule, run.peers.seed, self.programs.form)
            self.programs = self.programs.broken(faults.broken([peer], step).get(peer))
        if of in ("step", "loss") and run.peers.bits != "everywhere":
            raise LockstepError(
                f'[peers] bits = "{run.peers.bits}", expected "everywhere": {of} goes as compiled, '
                "and its operations have no bits of their own"
            )
        if not 0 <= peer < run.peers.count:
            raise LockstepError(f"--peer {peer}: expected 0 to {run.peers.count - 1}")

    def record(self, transcript: Transcript, against: BitsRecord | None) -> BitsRecord:
        """Return the record; `recorder` keeps the first operation that differs from `against`.

        Raises:
          LockstepError: The run has no such round, or the peer did not train in it.
        """
        self.recorder = Recorder(against)
        try:
            self._weights() if self.of == "weights" else self._round(transcript)
        except _RecordedError:
            return self._written()
        raise LockstepError(
            f"{transcript.folder}: round {self.step} has no {self.of} of peer {self.peer}, "
            "expected a round in which it trained"
        )

    def _written(self) -> BitsRecord:
        setup, here = self.setup, devices.describe()
        names = ("device_kind", "instruction_set", "threads", "xla_flags", "jaxlib")
        return BitsRecord(
            key=key_of(setup, TABLES),
            of=self.of,
            round=self.step,
            peer=self.peer,
            machine={name: str(here[name])[:400] for name in names},
            operations=tuple(self.recorder.operations),
        )

    def _taken(self, function: Callable[..., Any], names: Sequence[str]) -> Callable[..., NoReturn]:
        """Return a function that takes another's operations, and ends the recording."""

        def recorded(*arguments: Any) -> NoReturn:
            by_operation(function, self.recorder.hear, names)(*arguments)
            raise _RecordedError

        return recorded

    def _weights(self) -> None:
        checkpoint = self.setup.run.llm.checkpoint
        if not isinstance(checkpoint, runfile.CheckpointInit):
            raise LockstepError(
                f"model.LLM.checkpoint: {runfile.variant_name(checkpoint)}, expected Init: other "
                "weights are not drawn"
            )
        model, config = hf.model_of(self.setup.model, "model.LLM.checkpoint.Init.config")

        def drawn(_: Any) -> Any:
            return fresh_params(model, config, checkpoint.seed)

        self._taken(drawn, ["seed"])(np.int32(checkpoint.seed))

    def _round(self, transcript: Transcript) -> None:
        setup = self.setup
        windows = setup.run.snapshots(setup.start.step).windows
        window = next((window for window in windows if self.step in window.rounds), None)
        if window is None:
            raise LockstepError(
                f"--round {self.step}: expected {setup.start.step + 1} to "
                f"{setup.run.config.total_steps}"
            )
        replay = Replay(setup, transcript)
        alone = replay.kept and self.of != "merge"
        peers = [self.peer] if alone else [] if replay.kept else range(setup.run.peers.count)
        replaying = WindowReplay(replay, window, peers, replay.groups[0])
        for entry in transcript.window(window):
            if entry.round.step < self.step:
                if not replaying.take(entry):
                    raise LockstepError(
                        f"{transcript.folder}: round {entry.round.step} applied a message that is "
                        "not kept and does not repeat, expected one that does"
                    )
                continue
            if self.of == "merge":
                self._instead(replaying, "receive", same_bits(setup.programs.update_of_all), MERGE)
            elif self.peer not in entry.round.assignment:
                return
            elif self.of == "step":
                replaying.own = {self.peer: replaying.own[self.peer]}
                self._instead(replaying, "peer_step", self.programs.step_of_a_peer, STEP)
            else:
                self._loss(replaying.params.replica.params, entry.round)
            replaying.take(entry)
            return

    def _instead(
        self, replaying: WindowReplay, name: str, function: Callable[..., Any], names: Sequence[str]
    ) -> None:
        """Have a replay call the function that records in the place of one of its programs."""
        programs = copy(self.setup.programs)  # others may use them, too
        setattr(programs, name, self._taken(function, names))
        replaying.params.replica = replace(replaying.params.replica, programs=programs)

    def _loss(self, params: Any, round_: Round) -> None:
        """Record what is measured of the loss of the first micro-batch of the peer's rows."""
        rows = self.setup.work(round_.assignment[self.peer], round_.trainers).rows_MB
        first = jax.tree.map(lambda x: np.asarray(x[0]), rows)
        self._taken(self.setup.programs.steps.measure, ("params", "rows"))(params, first)
