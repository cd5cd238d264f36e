"""What does it cost that others know a peer's momentum with an error only? The noise test.

    lockstep download && lockstep convert
    python -m benchmarks.tracked --noise 0
    python -m benchmarks.tracked --noise 0.4
    python -m benchmarks.tracked --noise 0.4 --correlated

Each peer sends its momentum, m_p <- beta m_p + g_p, and its error is added to it: Gaussian, of
`noise` times the momentum's energy, independent of the other peers'. 0.1 bit for each param and
step allow 0.40, by the rate of an AR(1) source, 1/2 log2(beta^2 + (1 - beta^2) / D). It is a bound,
and no code: nothing is saved. Correlated, the error keeps beta of itself from step to step, as that
of an estimate that all keep does.

Layers step by the orthogonalised mean of what was sent, embedding, head and norms by it over the
root of its mean square (Adam without a first moment of its own), at Muon's step sizes. The energy
is that of a matrix in layers, and of a token's row elsewhere.
"""

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.methods import CARDS
from lockstep.methods.dense import STEP_SCALE
from lockstep.optim.directions import orthogonal
from lockstep.optim.optimizer import Optimizer, RoundPeers, Tree, group_of, rate
from lockstep.optim.schedules import LearningRate

BETA, SECOND, EPS, DECAY = 0.95, 0.95, 1e-8, 0.1
LAYERS = "layers"


class Tracked(NamedTuple):
    """What all peers share: the errors of each peer's momentum, and the mean squares."""

    error: Tree  # [peer, ...]
    square: Tree
    steps: jax.Array


def tracked(
    learning_rate: LearningRate, peers: int, noise: float, *, correlated: bool, seed: int
) -> Optimizer:
    """Return the optimizer of the noise test; see the module."""

    def init(params: Tree) -> tuple[Tree, Tracked]:
        zeros = jax.tree.map(jnp.zeros_like, params)
        errors = jax.tree.map(lambda x: jnp.zeros((peers, *x.shape)), params)
        return zeros, Tracked(errors, jax.tree.map(jnp.copy, zeros), jnp.zeros((), jnp.int32))

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        return jax.tree.map(lambda m, g: BETA * m + g, own, grads)

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        return own, own

    def receive(
        messages: Tree, of: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        keys = iter(jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 10_000))

        def err(path: tuple, m: jax.Array, e: jax.Array) -> jax.Array:
            size = jnp.sqrt(noise * _energy(path, m))
            fresh = size * jax.random.normal(next(keys), m.shape)
            return BETA * e + (1 - BETA**2) ** 0.5 * fresh if correlated else fresh

        error = jax.tree.map_with_path(err, messages, shared.error)
        mean = jax.tree.map(lambda m, e: jnp.mean(m + e, axis=0), messages, error)
        steps = shared.steps + 1
        square = jax.tree.map(lambda v, m: SECOND * v + (1 - SECOND) * m**2, shared.square, mean)

        def move(path: tuple, m: jax.Array, v: jax.Array, theta: jax.Array) -> jax.Array:
            group = group_of(path)
            if group == LAYERS and m.ndim > 2:
                d = orthogonal(m)
            else:
                d = m / (jnp.sqrt(v / (1 - SECOND**steps)) + EPS)
            d = STEP_SCALE.get(group, 1.0) * d
            return -rate(learning_rate, step) * (d + DECAY * theta)

        return jax.tree.map_with_path(move, mean, square, params), Tracked(error, square, steps)

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        raise NotImplementedError("nobody audits a noise test")

    return Optimizer(init, accumulate, send, receive, compare, partial(jax.tree.map, lambda _: 0))


def _energy(path: tuple, m: jax.Array) -> jax.Array:
    """Return the mean square of each matrix of layers, or of each token's row; of each peer."""
    if m.ndim < 3:
        axes: tuple[int, ...] = (-1,)
    elif group_of(path) == LAYERS:
        axes = (-2, -1) if m.ndim > 3 else (-1,)
    else:
        axes = (-1 if m.shape[-1] < m.shape[-2] else -2,)
    return jnp.mean(jnp.square(m), axis=axes, keepdims=True)


def main() -> None:
    """Train once, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, default=Path("params/run.toml"))
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--noise", type=float, required=True)
    parser.add_argument("--correlated", action="store_true")
    parser.add_argument("--rate", type=float, default=CARDS["muon"].rates[0].rate)
    parser.add_argument("--rounds", type=int, help="by default the run's")
    asked = parser.parse_args()

    from pipeline import runfile
    from pipeline.stage import devices

    run = runfile.load(asked.run)
    devices.prepare(run)
    from lockstep.programs.train_step import Programs
    from lockstep.swarm.faults import FaultSchedule
    from lockstep.swarm.peers import make_peers
    from lockstep.swarm.swarm import Swarm
    from lockstep.transcript.state import State
    from pipeline.language_model import held_out
    from pipeline.runfile.like import at_rate
    from pipeline.runfile.method import learning_rate_of_run
    from pipeline.start import begin
    from pipeline.start.begin import Start

    tables = run.model_dump(mode="json", exclude_none=True)
    at_rate(tables, asked.rate)
    run = runfile.parse(tables, str(asked.run))
    init, shards = asked.root / "data/init", asked.root / "data/shards"
    setup = begin.read(run, init, shards)
    kind = {"correlated": asked.correlated, "seed": run.peers.seed}
    optimizer = tracked(learning_rate_of_run(run), run.peers.count, asked.noise, **kind)
    programs = Programs(setup.programs.task, optimizer, wire=run.peers.wire)
    params = setup.start.state.params
    own, shared = jax.device_get(programs.init(params))
    state = State(params, shared, (own,) * run.peers.count)
    setup = dataclasses.replace(setup, programs=programs, start=Start(state, 0, 0))
    peers = make_peers(programs, run.peers.layout, state, jax.devices())
    faults = FaultSchedule([], run.peers.seed, programs.form)
    swarm = Swarm(setup.settings, peers, lambda _: setup.data, faults)
    rows_NW = held_out.read(run, shards).rows_NW
    progress = setup.start.progress(setup.settings)
    rounds, curve = asked.rounds or run.config.total_steps, {}
    for step in range(1, rounds + 1):
        progress, _ = swarm.take_round(progress)
        if step == rounds or step % run.held_out.every == 0:
            loss = held_out.mean_loss(peers.measure, rows_NW, setup.settings.micro_batch)
            curve[step] = round(loss.mean, 4)
    said = {"benchmark": "tracked", "noise": asked.noise, "correlated": asked.correlated}
    print(json.dumps(said | {"rate": asked.rate, "curve": curve, "held_out": loss.mean}))


if __name__ == "__main__":
    main()
