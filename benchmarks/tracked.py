"""What does it cost that others know a peer's momentum with an error only? A bound, and a code.

    lockstep download && lockstep convert
    python -m benchmarks.tracked --noise 0
    python -m benchmarks.tracked --noise 0.4
    python -m benchmarks.tracked --noise 0.4 --correlated
    python -m benchmarks.tracked --bits 0.1

Each peer sends its momentum, m_p <- beta m_p + g_p, and its error is added to it: Gaussian, of
`noise` times the momentum's energy, independent of the other peers'. 0.1 bit for each param and
step allow 0.40, by the rate of an AR(1) source, 1/2 log2(beta^2 + (1 - beta^2) / D). It is a bound,
and no code: nothing is saved. Correlated, the error keeps beta of itself from step to step, as that
of an estimate that all keep does.

Layers step by the orthogonalised mean of what was sent, embedding, head and norms by it over the
root of its mean square (Adam without a first moment of its own), at Muon's step sizes. The energy
is that of a matrix in layers, and of a token's row elsewhere.

With `--bits` the error is a real code's. All keep an estimate of each peer's momentum, which decays
as the momentum does, e <- beta e. A message corrects it at the share `bits` of all places, by the
sign of what it lacks there times a step size: what is expected to be lacking, sigma, times one
number for each array that the peer fits. All know the places from the round before, so none
travels: those of the largest sigma^2, which a sign leaves 0.36 of and a round moves by
s <- beta^2 s + (1 - beta^2) v, v half of e^2 + s there, half of its means by row and column. Only
the numbers that fit (32 bits for each array) come on top of `bits`.
"""

import argparse
import dataclasses
import json
import math
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
TINY = 1e-30
LEFT = 0.36  # of a Gaussian's variance, by its sign
LAYERS = "layers"


class Moved(NamedTuple):
    """What steps need of those before: the mean squares, and how many there were."""

    square: Tree
    steps: jax.Array

    @classmethod
    def none(cls, params: Tree) -> "Moved":
        return cls(jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))


def stepped(
    params: Tree,
    mean: Tree,
    moved: Moved,
    learning_rate: LearningRate,
    step: jax.Array,
    lacks: Tree | None = None,
) -> tuple[Tree, Moved]:
    """Step along the peers' mean momentum: orthogonalised in layers, by Adam's root elsewhere.

    `lacks` is the variance that the mean is expected to lack: the root is of it and of the mean's
    square, or a place that is seldom sent takes steps of 1 / sqrt(1 - SECOND).
    """
    steps = moved.steps + 1
    whole = jax.tree.map(jnp.square, mean)
    whole = whole if lacks is None else jax.tree.map(jnp.add, whole, lacks)
    square = jax.tree.map(lambda v, x: SECOND * v + (1 - SECOND) * x, moved.square, whole)

    def move(path: tuple, m: jax.Array, v: jax.Array, theta: jax.Array) -> jax.Array:
        group = group_of(path)
        if group == LAYERS and m.ndim > 2:
            d = orthogonal(m)
        else:
            d = m / (jnp.sqrt(v / (1 - SECOND**steps)) + EPS)
        d = STEP_SCALE.get(group, 1.0) * d
        return -rate(learning_rate, step) * (d + DECAY * theta)

    return jax.tree.map_with_path(move, mean, square, params), Moved(square, steps)


class Tracked(NamedTuple):
    """What all peers share: the errors of each peer's momentum, and what steps need."""

    error: Tree  # [peer, ...]
    moved: "Moved"


def tracked(
    learning_rate: LearningRate, peers: int, noise: float, *, correlated: bool, seed: int
) -> Optimizer:
    """Return the optimizer of the noise test; see the module."""

    def init(params: Tree) -> tuple[Tree, Tracked]:
        zeros = jax.tree.map(jnp.zeros_like, params)
        errors = jax.tree.map(lambda x: jnp.zeros((peers, *x.shape)), params)
        return zeros, Tracked(errors, Moved.none(params))

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
        params, moved = stepped(params, mean, shared.moved, learning_rate, step)
        return params, Tracked(error, moved)

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        raise NotImplementedError("nobody audits a noise test")

    return Optimizer(init, accumulate, send, receive, compare, partial(jax.tree.map, lambda _: 0))


class Estimated(NamedTuple):
    """What all peers share: the estimates, and the variance that is expected to be lacking."""

    each: Tree  # [peer, ...]
    lacks: Tree
    moved: Moved


def coded(learning_rate: LearningRate, peers: int, bits: float) -> Optimizer:
    """Return the optimizer whose messages are signs at a share of the places; see the module."""

    def init(params: Tree) -> tuple[Tree, Estimated]:
        zeros = partial(jax.tree.map, jnp.zeros_like)
        each = jax.tree.map(lambda x: jnp.zeros((peers, *x.shape)), params)
        lacks = jax.tree.map(jnp.ones_like, params)
        return (zeros(params), zeros(params)), Estimated(each, lacks, Moved.none(params))

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        momentum, estimate = own
        return jax.tree.map(lambda m, g: BETA * m + g, momentum, grads), estimate

    def send(own: Tree, params: Tree, shared: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        momentum, estimate = own

        def message(m: jax.Array, e: jax.Array, lacks: jax.Array) -> jax.Array:
            here, sigma = _places(lacks, bits), jnp.sqrt(lacks)
            lacking = jnp.where(here, m - BETA * e, 0.0)
            fitted = jnp.sum(jnp.abs(lacking) * sigma) / jnp.sum(here * lacks)
            return jnp.sign(lacking) * fitted * sigma

        sent = jax.tree.map(message, momentum, estimate, shared.lacks)
        return sent, (momentum, jax.tree.map(lambda e, q: BETA * e + q, estimate, sent))

    def receive(
        messages: Tree, of: RoundPeers, params: Tree, shared: Tree, step: jax.Array
    ) -> tuple[Tree, Tree]:
        each = jax.tree.map(lambda e, q: BETA * e + q, shared.each, messages)
        mean = jax.tree.map(lambda e: jnp.mean(e, axis=0), each)
        lacks = jax.tree.map(partial(_lacking, bits=bits), each, messages, shared.lacks)
        params, moved = stepped(params, mean, shared.moved, learning_rate, step, lacks)
        return params, Estimated(each, lacks, moved)

    def compare(own: Tree, message: Tree, params: Tree, step: jax.Array) -> tuple[jax.Array, Tree]:
        raise NotImplementedError("nobody audits a test of a code")

    return Optimizer(init, accumulate, send, receive, compare, partial(jax.tree.map, lambda _: 0))


def _places(lacks: jax.Array, bits: float) -> jax.Array:
    """Return where all send: the share `bits` of an array that lacks most."""
    _, chosen = jax.lax.top_k(lacks.ravel(), max(1, round(bits * lacks.size)))
    return jnp.zeros(lacks.size, bool).at[chosen].set(True).reshape(lacks.shape)


def _lacking(each: jax.Array, sent: jax.Array, lacks: jax.Array, bits: float) -> jax.Array:
    """Return the variance that is expected to be lacking in the next round."""
    here = _places(lacks, bits)
    seen = jnp.sum(jnp.square(sent)) / len(sent) * (math.pi / 2)  # by the numbers that fit
    lacks = lacks * jnp.sqrt((seen + TINY) / (jnp.sum(here * lacks) + TINY))
    lacks = jnp.where(here, LEFT * lacks, lacks)
    whole = jnp.mean(jnp.square(each), axis=0) + lacks
    energy = jnp.mean(whole, -1, keepdims=True)
    if whole.ndim > 1:
        energy *= jnp.mean(whole, -2, keepdims=True) / jnp.mean(whole, (-2, -1), keepdims=True)
    return BETA**2 * lacks + (1 - BETA**2) * (energy + whole) / 2


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
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--noise", type=float)
    kind.add_argument("--bits", type=float, help="of a message, for each param")
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
    common = learning_rate_of_run(run), run.peers.count
    if asked.bits is not None:
        optimizer = coded(*common, asked.bits)
    else:
        errors = {"correlated": asked.correlated, "seed": run.peers.seed}
        optimizer = tracked(*common, asked.noise, **errors)
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
    said |= {"bits": asked.bits, "rate": asked.rate, "curve": curve, "held_out": loss.mean}
    if asked.bits is not None:
        said["lacking"] = _lacking_of(peers.own(0))
    print(json.dumps(said))


def _lacking_of(own: Tree) -> dict[str, float]:
    """Return the energy that the estimate lacks, over the momentum's, by group of arrays."""
    sums: dict[str, list[float]] = {}
    for (path, m), e in zip(
        jax.tree.leaves_with_path(own[0]), jax.tree.leaves(own[1]), strict=True
    ):
        both = sums.setdefault(group_of(path), [0.0, 0.0])
        both[0] += float(jnp.sum(jnp.square(m - e)))
        both[1] += float(jnp.sum(jnp.square(m)))
    return {group: round(lacks / whole, 4) for group, (lacks, whole) in sums.items()}


if __name__ == "__main__":
    main()
