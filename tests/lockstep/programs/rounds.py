"""Rounds of simulated peers, for tests: a run's programs, its first state, and its losses."""

import json
from collections.abc import Callable
from functools import cache

import jax
import numpy as np

from lockstep.programs.columns import PLAIN
from lockstep.programs.train_step import Programs
from lockstep.swarm.peers import RoundMerge, RoundSteps, SimulatedPeers, make_peers
from lockstep.transcript.state import State
from pipeline.language_model.language_model import programs_of
from pipeline.runfile import Run
from tests import tiny

ONE_LAYER = tiny.MODEL | {"num_hidden_layers": 1}  # which compiles in two thirds of the time


def begin(
    run: Run, model: dict = ONE_LAYER, columns: tuple[str, ...] = PLAIN
) -> tuple[Programs, State]:
    """A run's programs, which tests of the same run share, and its first state."""
    programs = _programs(run.model_dump_json(), json.dumps(model), columns)
    params = programs.task.model.init(programs.task.model_config, seed=0)
    own, shared = programs.init(params)
    return programs, jax.device_get(State(params, shared, (own,) * run.peers.count))


@cache
def _programs(run: str, model: str, columns: tuple[str, ...]) -> Programs:
    return programs_of(Run.model_validate_json(run), json.loads(model), columns=columns)


def train(
    run: Run,
    programs: Programs,
    state: State,
    batch: Callable[[int, int], np.ndarray],
    *,
    devices: int,
    steps: int,
) -> tuple[list[float], SimulatedPeers]:
    """The mean loss of each step on the sequences `batch(peer, step)`, and the peers after them."""
    peers = make_peers(programs, run.peers.layout, state, jax.devices()[:devices])
    found = []
    for step in range(1, steps + 1):
        work = {}
        for peer in range(run.peers.count):
            rows = batch(peer, step)
            work[peer] = programs.work(rows, len(rows), run.peers.micro_batch)
        done = peers.step(RoundSteps(work, step))
        found.append(float(np.mean([d.loss for d in done.values()])))
        messages = {p: d.message for p, d in done.items()}
        assigned = {p: w.count for p, w in work.items()}
        peers.receive(RoundMerge(messages, assigned, step, assigned))
    return found, peers
