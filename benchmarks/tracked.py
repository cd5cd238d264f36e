"""What would steps of a peer's own gain, by momenta that others know with an error only?

    lockstep download && lockstep convert
    python -m benchmarks.tracked --noise 0.4 --every 12

As the noise test (`git show 570eaa9a:benchmarks/tracked.py`), but each peer knows its own momentum
exactly, so its error is not in the mean by which it steps: peers drift apart, and their params are
averaged, unrounded, after every `--every` rounds. A bound, and no code: nothing is saved. The
drifts of all peers are in the shared state, and a peer's number in its own.
"""

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.methods import CARDS
from lockstep.methods.dense import STEP_SCALE
from lockstep.optim.directions import orthogonal
from lockstep.optim.optimizer import Optimizer, Tree, group_of, rate

BETA, SECOND, EPS, DECAY = 0.95, 0.95, 1e-8, 0.1
LAYERS = "layers"


class Tracked(NamedTuple):
    drift: Tree  # [peer, ...]
    square: Tree  # [peer, ...]
    steps: jax.Array


class Own(NamedTuple):
    m: Tree
    index: jax.Array


def tracked(learning_rate, peers, noise, *, every, total, seed):
    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        every_peers = partial(jax.tree.map, lambda x: jnp.zeros((peers, *x.shape)), params)
        return Own(zeros, jnp.zeros((), jnp.int32)), Tracked(
            every_peers(), every_peers(), jnp.zeros((), jnp.int32)
        )

    def lookahead(params, own, shared, step):
        return jax.tree.map(lambda p, d: p + d[own.index], params, shared.drift)

    def accumulate(grads, own, params, step):
        return own._replace(m=jax.tree.map(lambda m, g: BETA * m + g, own.m, grads))

    def send(own, params, shared, step):
        return own.m, own

    def receive(messages, of, params, shared, step):
        keys = iter(jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 10_000))

        def seen(path, m):
            size = jnp.sqrt(noise * _energy(path, m))
            e = size * jax.random.normal(next(keys), m.shape)
            return jnp.mean(m + e, axis=0, keepdims=True) - e / peers  # its own is exact

        agreed = jax.tree.map_with_path(seen, messages)
        steps = shared.steps + 1
        square = jax.tree.map(lambda v, m: SECOND * v + (1 - SECOND) * m**2, shared.square, agreed)

        def move(path, m, v, theta, drift):
            group = group_of(path)
            if group == LAYERS and m.ndim > 3:
                d = jax.vmap(orthogonal)(m)
            else:
                d = m / (jnp.sqrt(v / (1 - SECOND**steps)) + EPS)
            d = STEP_SCALE.get(group, 1.0) * d
            return drift - rate(learning_rate, step) * (d + DECAY * (theta + drift))

        drift = jax.tree.map_with_path(move, agreed, square, params, shared.drift)
        now = (step % every == 0) | (step == total)
        mean = jax.tree.map(lambda d: jnp.where(now, jnp.mean(d, axis=0), 0.0), drift)
        drift = jax.tree.map(lambda d: jnp.where(now, 0.0, d), drift)
        return mean, Tracked(drift, square, steps)

    def compare(own, message, params, step):
        raise NotImplementedError

    return Optimizer(
        init, accumulate, send, receive, compare, partial(jax.tree.map, lambda _: 0), lookahead
    )


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
    parser.add_argument("--every", type=int, default=12)
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
    rounds = asked.rounds or run.config.total_steps
    kind = {"every": asked.every, "total": rounds, "seed": run.peers.seed}
    optimizer = tracked(learning_rate_of_run(run), run.peers.count, asked.noise, **kind)
    programs = Programs(setup.programs.task, optimizer, wire=run.peers.wire)
    params = setup.start.state.params
    own, shared = jax.device_get(programs.init(params))

    state = State(
        params, shared, tuple(own._replace(index=np.int32(i)) for i in range(run.peers.count))
    )
    setup = dataclasses.replace(setup, programs=programs, start=Start(state, 0, 0))
    peers = make_peers(programs, run.peers.layout, state, jax.devices())
    faults = FaultSchedule([], run.peers.seed, programs.form)
    swarm = Swarm(setup.settings, peers, lambda _: setup.data, faults)
    rows_NW = held_out.read(run, shards).rows_NW
    progress = setup.start.progress(setup.settings)
    curve = {}
    for step in range(1, rounds + 1):
        progress, _ = swarm.take_round(progress)
        if step == rounds or step % 48 == 0:
            loss = held_out.mean_loss(peers.measure, rows_NW, setup.settings.micro_batch)
            curve[step] = round(loss.mean, 4)
    said = {"benchmark": "tracked", "noise": asked.noise, "every": asked.every}
    print(json.dumps(said | {"rate": asked.rate, "curve": curve, "held_out": loss.mean}))


if __name__ == "__main__":
    main()
