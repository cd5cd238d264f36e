"""Peers of a run that take rounds on random tokens, and parts of these by themselves, to time."""

import os

import jax
import numpy as np

from benchmarks.measuring import in_turns
from lockstep.programs.replica import RoundMerge
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import RoundSteps, make_peers, work_of
from lockstep.swarm.swarm import Swarm
from lockstep.swarm.training_loop import Start
from lockstep.transcript.state import State
from pipeline import runfile
from pipeline.language_model import cudnn
from pipeline.language_model.language_model import programs_of
from pipeline.start.round_settings import round_settings


class Trial:
    """Rounds as stage `train` takes them, and what devices do in them: `gradient` is the part of
    `step` that every optimizer has, and `apply` the merge. Import it once the devices are prepared.

    Args:
      run: its `checkpoint.Init` is the model.
      layout: of the peers, as `[peers] layout`.
    """

    def __init__(self, run: runfile.Run, layout: str = "each"):
        hf_config = run.llm.checkpoint.config
        cudnn.check(run, hf_config)
        self.programs = programs_of(run, hf_config)
        self._gradient = jax.jit(self.programs.steps.gradient)
        model_config = self.programs.task.model.Config.from_hf(hf_config)
        self.params = jax.device_get(self.programs.task.model.init(model_config, seed=0))
        own, shared = jax.device_get(self.programs.init(self.params))
        count, settings = run.peers.count, round_settings(run)
        start = Start(State(self.params, shared, (own,) * count), 0, 0)
        self.peers = make_peers(self.programs, layout, start.state, jax.devices())
        faults = FaultSchedule([], run.peers.seed, self.programs.form)
        self.swarm = Swarm(settings, self.peers, lambda _: self, faults)
        self.progress = start.progress(settings)
        self._shape = settings.closing.capacity(count), run.llm.max_seq_len
        self._vocabulary = hf_config["vocab_size"]
        span = 0, self._shape[0] - 1
        work = work_of(settings, self.programs, self, span, count)
        self.work = dict.fromkeys(range(count), work)
        self.tokens = count * self._shape[0] * self._shape[1]

    def take(self, indices_N: np.ndarray) -> np.ndarray:
        """Some rows of tokens, of which a round has no more; the same whatever the indices are."""
        rng = np.random.default_rng(0)
        tokens_NT = rng.integers(self._vocabulary, size=self._shape, dtype=np.int32)
        return tokens_NT[: len(indices_N)]

    def forward(self) -> None:
        """All peers' losses, and no gradient: of their first micro-batch each."""
        losses = []
        for peer, (tokens_MBT, _) in self.work.items():
            group = self.peers.group_of(peer)
            tokens_BT = group.rows(tokens_MBT[0], axis=0)
            losses.append(self.programs.steps.measure(self.peers.params_on[group], tokens_BT))
        jax.block_until_ready(losses)

    def gradient(self) -> None:
        """All peers' gradients, and nothing else."""
        jax.block_until_ready(self.gradients())

    def gradients(self) -> list:
        """What all peers' gradients will be, with their losses."""
        grads = []
        for peer, (tokens_MBT, count) in self.work.items():
            group = self.peers.group_of(peer)
            arguments = group.rows(tokens_MBT, axis=1), group.whole(count)
            grads.append(self._gradient(self.peers.params_on[group], *arguments))
        return grads

    def step(self) -> None:
        """All peers' gradients and messages."""
        steps = RoundSteps(self.work, 1, pack=lambda message, peer: message)
        self.messages = {p: done.message for p, done in self.peers.step(steps).items()}
        jax.block_until_ready(self.messages)

    def apply(self) -> None:
        """The params of the next round, on every device, by the messages of a step."""
        assigned = {peer: work.count for peer, work in self.work.items()}
        self.peers.receive(RoundMerge(self.messages, assigned, 1, assigned))
        jax.block_until_ready(list(self.peers.params_on.values()))

    def take_round(self) -> None:
        """All of a round, with its messages as bytes."""
        self.progress, finished = self.swarm.take_round(self.progress)
        assert finished, "the run has no rounds left"
        self.bytes_up = finished.entry.evidence.messages[0].bytes
        jax.block_until_ready(list(self.peers.params_on.values()))


def rounds_of(run: runfile.Run, layout: str, rounds: int) -> dict:
    """Medians over rounds, and over two of their parts alone, after one that compiles.

    The exchange is what a round takes besides: messages go to the host and become bytes, which the
    steps of others hide where they can, and peers agree on what was sent.
    """
    trial = Trial(run, layout)
    parts = {"step": trial.step, "apply": trial.apply, "round": trial.take_round}
    seconds = in_turns(parts, rounds + 1, warm=0)
    first = sum(times.pop(0) for times in seconds.values())
    median = {part: float(np.median(times)) for part, times in seconds.items()}
    median["exchange"] = median["round"] - median["step"] - median["apply"]
    return {
        "benchmark": "rounds",
        "layout": layout,
        "optimizer": run.llm.optimizer.tag(),
        "peers": run.peers.count,
        "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(trial.params))),
        "tokens_per_peer": trial.tokens // run.peers.count,
        "device": jax.devices()[0].device_kind,
        "devices": len(trial.peers.groups),
        "threads": os.environ["NPROC"],
        "first_round_seconds": round(first, 2),
        "tokens_per_second": round(trial.tokens / median["round"]),
        **{f"{part}_milliseconds": round(1000 * s, 2) for part, s in median.items()},
        "bytes_up": trial.bytes_up,
    }
