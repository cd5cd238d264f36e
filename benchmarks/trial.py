"""Peers of a run that take rounds on random tokens, each part by itself, for benchmarks to time."""

import os

import jax
import numpy as np

from benchmarks.measuring import in_turns
from lockstep.swarm.peers import RoundSteps, make_peers
from lockstep.transcript.state import State
from lockstep.wire import message as wire
from pipeline import runfile
from pipeline.language_model import cudnn
from pipeline.language_model.language_model import programs_of
from pipeline.start.round_settings import round_settings


class Trial:
    """A round is `step`, `exchange` and `apply`; `gradient` is the part of `step` that every
    optimizer has. Import it once the devices are prepared.

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
        count = run.peers.count
        state = State(self.params, shared, (own,) * count)
        self.peers = make_peers(self.programs, layout, state, jax.devices())
        per_peer = round_settings(run).closing.capacity(count)
        vocabulary = hf_config["vocab_size"]
        shape = per_peer, run.llm.max_seq_len
        tokens_NT = np.random.default_rng(0).integers(vocabulary, size=shape, dtype=np.int32)
        work = self.programs.work(tokens_NT, per_peer, run.peers.micro_batch)
        self.work = dict.fromkeys(range(count), work)
        self.tokens = count * per_peer * run.llm.max_seq_len
        self.rounds = 0

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
        self.rounds += 1
        self.results = self.peers.step(RoundSteps(self.work, self.rounds))

    def exchange(self) -> None:
        """All messages to bytes and back."""
        form = self.programs.form
        self.payloads = {p: wire.encode(result.message, form) for p, result in self.results.items()}
        self.received = {peer: wire.decode(data, form) for peer, data in self.payloads.items()}

    def apply(self) -> None:
        """The params of the next round, on every device."""
        assigned = {peer: work.count for peer, work in self.work.items()}
        self.peers.receive(self.received, assigned, self.rounds)
        jax.block_until_ready(list(self.peers.params_on.values()))

    def take_round(self) -> None:
        """All of a round."""
        self.step()
        self.exchange()
        self.apply()


def rounds_of(run: runfile.Run, layout: str, rounds: int) -> dict:
    """Medians over rounds, part by part, after one that compiles.

    Every part waits for the devices: they add up to a round a little slower than in stage `train`.
    """
    trial = Trial(run, layout)
    parts = {"step": trial.step, "exchange": trial.exchange, "apply": trial.apply}
    seconds = in_turns(parts, rounds + 1, warm=0)
    first = sum(times.pop(0) for times in seconds.values())
    median = {part: float(np.median(times)) for part, times in seconds.items()}
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
        "tokens_per_second": round(trial.tokens / sum(median.values())),
        **{f"{part}_milliseconds": round(1000 * s, 2) for part, s in median.items()},
        "bytes_up": len(trial.payloads[0]),
    }
