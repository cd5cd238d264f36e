"""A run of the swarm without stages: a tiny model, made data, a transcript in a folder, an audit.

All that trains and audits is the pipeline's own; only files that stages would read are made here.
Programs are compiled once for many runs, which may differ in seed, faults and links.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from lockstep.programs.placement import DeviceGroup, side_by_side
from lockstep.programs.train_step import Programs
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import RunningPeers, make_peers
from lockstep.swarm.swarm import Swarm
from lockstep.swarm.training_loop import Record, Start, TrainingLoop
from lockstep.transcript.entry import TABLES, Header
from lockstep.transcript.observer import Observer
from lockstep.transcript.state import State
from lockstep.transcript.transcript import Transcript, Writer
from lockstep.transcript.windows import Window
from models.llama import llama
from pipeline import runfile
from pipeline.audit.audit import audit
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding, contradictions, merged
from pipeline.language_model.language_model import programs_of
from pipeline.start.round_settings import round_settings
from pipeline.start.set_up import Setup


class Made:
    """Sequences that a model can learn, each a pure function of its index."""

    def __init__(self, length: int, vocabulary: int):
        self.length, self.vocabulary = length, vocabulary

    def take(self, indices: np.ndarray) -> np.ndarray:
        """The sequences at `indices`: each token follows from the one before, mostly."""
        rows = [self._row(int(index)) for index in indices]
        return np.array(rows, np.int32).reshape(len(rows), self.length)

    def _row(self, index: int) -> np.ndarray:
        rng = np.random.default_rng(index)
        noise = np.where(rng.random(self.length) < 0.1, rng.integers(99, size=self.length), 1)
        row = np.zeros(self.length, np.int64)
        row[0] = rng.integers(self.vocabulary)
        for place in range(1, self.length):
            row[place] = (3 * row[place - 1] + noise[place]) % self.vocabulary
        return row


class Trained(NamedTuple):
    """A transcript, how often each fault changed something, and the params at the end."""

    transcript: Transcript
    fired: Counter[str]
    params: dict


class Lab:
    """Programs of one model and optimizer, and runs by them.

    Args:
      run: the run; others may differ from it in seed, faults, links and `[config]`.
      hf_config: the model's config.json.
      devices: how many devices peers are spread over; each compiles the programs anew. All there
        are by default.
    """

    def __init__(self, run: runfile.Run, hf_config: dict, devices: int | None = None):
        self.run, self.hf_config = run, hf_config
        self.devices = jax.devices()[:devices]
        self.programs = programs_of(run, hf_config)
        self.data = Made(run.llm.max_seq_len, hf_config["vocab_size"])

    @cached_property
    def begin(self) -> Start:
        """What all runs start from."""
        params = llama.init(llama.Config.from_hf(self.hf_config), 0)
        own, shared = jax.tree.map(np.asarray, self.programs.init(params))
        count = self.run.peers.count
        return Start(State(jax.tree.map(np.asarray, params), shared, (own,) * count), 0, 0)

    def begin_exactly(self) -> None:
        """Begin from params of a like spread that no machine draws otherwise."""
        rng = np.random.default_rng(0)

        def exact(leaf: np.ndarray) -> np.ndarray:
            if leaf.ndim < 2 or (leaf == 1).all():  # norms
                return leaf
            return (rng.integers(-512, 513, leaf.shape) / 2**14).astype(np.float32)

        params = jax.tree.map(exact, self.begin.state.params)
        own, shared = jax.tree.map(np.asarray, self.programs.init(params))
        self.begin = Start(State(params, shared, (own,) * self.run.peers.count), 0, 0)

    def begin_as(self, transcript: Transcript) -> None:
        """Begin as another run did: other devices draw other random params."""
        template = self.begin.state
        own = tuple(transcript.own(0, peer, tree) for peer, tree in enumerate(template.own))
        self.begin = Start(State(*transcript.agreed(0, template), own), 0, 0)

    def setup(self, run: runfile.Run, programs: Programs | None = None) -> Setup:
        """Return what an auditor of `run` computes with, by default by the lab's programs."""
        return Setup(run, self.hf_config, programs or self.programs, self.data, self.begin)

    def train(
        self,
        run: runfile.Run,
        folder: Path,
        peers: RunningPeers | None = None,
        observers: Sequence[Observer] = (),
    ) -> Trained:
        """Trains `run` by these peers, or some in this process; the transcript is in `folder`."""
        faults = FaultSchedule(run.faults.schedule, run.peers.seed, self.programs.form)
        peers = peers or make_peers(self.programs, run.peers.layout, self.begin.state, self.devices)
        settings = round_settings(run)
        writer = Writer(folder, run.snapshots())
        record = Record(writer)
        recorded = record.asked(self.programs.form)
        swarm = Swarm(settings, peers, lambda _: self.data, faults, recorded=recorded)
        writer.header(
            Header(
                key="0" * 64,
                run=run.model_dump(mode="json", include=TABLES),
                model=self.hf_config,
                environment=self.setup(run).environment(),
                bitwise=True,
                held_out_loss=None,
            )
        )
        writer.snapshot(0, self.begin.state)
        begun = record.begin(self.begin, settings)
        TrainingLoop(swarm, begun, record, run.config.total_steps, observers).take_rounds()
        return Trained(Transcript(folder), faults.fired, peers.state().params)

    def audit(
        self,
        run: runfile.Run,
        transcript: Transcript,
        *,
        elsewhere: Programs | None = None,
        sample: set[tuple[int, int]] | None = None,
    ) -> list[Finding]:
        """All checks, and a replay of some windows.

        Args:
          run: the run.
          transcript: of it.
          elsewhere: other programs, as another machine has them, of a run by rules.
          sample: pairs (window, peer); None is every window of every peer.
        """
        setup = self.setup(run, elsewhere)
        findings = audit(setup, transcript)
        if contradictions(findings):
            return findings
        peers = range(run.peers.count)
        work = [
            (window, [p for p in peers if sample is None or (number, p) in sample])
            for number, window in enumerate(run.snapshots().windows)
        ]
        replay = Replay(setup, transcript)

        def replay_item(item: tuple[Window, list[int]], group: DeviceGroup) -> list[Finding]:
            outcome = replay.window(*item, lambda: None, group)
            assert outcome.why is None, outcome.why
            return outcome.findings

        for batch in side_by_side(replay.groups[: len(self.devices)], work, replay_item):
            findings += batch
        return merged(findings)
