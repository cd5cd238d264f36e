"""Merges of every optimizer and rule, and every schedule; as a program, a hash of each result.

Their operands are made with NumPy, so that they are the same wherever this runs.
"""

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.optim import schedules
from lockstep.optim.aggregation import RULES
from lockstep.optim.compressed.compressor import Coefficients, Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.dense import adamw, muon
from lockstep.optim.local.outer_steps import cgad
from lockstep.optim.local.streaming import decoupled_diloco
from lockstep.optim.optimizer import Optimizer, RoundPeers
from lockstep.same_bits.evaluation import same_bits
from tests.lockstep.optim.optimizers import OPTIMIZERS, WITH_PARTS, make

PEERS, ROUNDS = 4, 2
RATE = schedules.cosine(0.02, 0.0, 10, 100, 0.002)
LAYERS = ("layers",)
SCHEDULES = {
    "cosine": RATE,
    "linear": schedules.linear(0.02, 0.001, 10, 100, 0.001),
    "warmup_stable_decay": schedules.warmup_stable_decay(0.02, 0, 10, 5, 10, 0.001, 10, 0.0001),
}
STACKED: dict[str, Callable[[], Optimizer]] = {  # with matrices of layers, and blocks of 64 x 64
    "muon_of_layers": lambda: muon(
        RATE, momentum=0.95, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, clip_grad_norm=1.0,
        step_scale={"b": 0.5}, stacked=LAYERS,
    ),
    "distro_of_layers": lambda: distro(
        CompressedMomentum(
            RATE, Compressor(5, 64, True, stacked=LAYERS), 0.95, 0.1, step_scale={"embed": 0.3}
        )
    ),
    "decoupled_cgad": lambda: decoupled_diloco(
        adamw(RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
        cgad(0.7, betas=(0.9, 0.95), eps=1e-8, alpha=0.3, cutoff=4.0),
        inner_steps=4, fragments=2, delay=1, adopt="carry",
    ),
    "distro_of_values": lambda: distro(
        CompressedMomentum(RATE, Compressor(8, 64, False, stacked=LAYERS), 0.95)
    ),
}  # fmt: skip


def params() -> dict:
    draw = np.random.default_rng(1).standard_normal
    shapes = {"embed": (96, 64), "layers": (2, 64, 160), "b": (77,)}
    return {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}


def optimizer_merges(optimizer: Optimizer) -> tuple[Callable, tuple]:
    """The merges of some rounds, and what they are of."""
    theta = params()
    own, shared = optimizer.init(theta)
    messages = _messages(optimizer, theta, own, shared)
    peers = RoundPeers.synchronous(jnp.array([3, 2, 0, 4], jnp.int32), optimizer.inner_steps)
    peers = peers._replace(age=jnp.array([0, 2, 0, 1], jnp.int32))

    def merge(messages, peers, theta, shared, step):
        for later in range(ROUNDS):
            updates, shared = optimizer.receive(messages, peers, theta, shared, step + later)
            theta = optax.apply_updates(theta, updates)
        return theta, shared

    return merge, (messages, peers, theta, shared, jnp.int32(1))


def _messages(optimizer: Optimizer, theta: Any, own: Any, shared: Any) -> Any:
    """Messages of random bits, positions in order, as peers send them."""

    def send(theta, own, shared):
        own = optimizer.accumulate(theta, own, theta, jnp.int32(1))
        return optimizer.send(own, theta, shared, jnp.int32(1))[0]

    like = jax.eval_shape(send, theta, own, shared)
    draw = np.random.default_rng(2)

    def numbers(leaf):
        if leaf.dtype == bool:
            return draw.random((PEERS, *leaf.shape)) < 0.5
        if np.issubdtype(leaf.dtype, np.integer):
            return draw.integers(0, 256, (PEERS, *leaf.shape)).astype(leaf.dtype)
        return draw.standard_normal((PEERS, *leaf.shape)).astype(leaf.dtype)

    def random_bits(leaf, area):
        if not isinstance(leaf, Coefficients):
            return jax.tree.map(numbers, leaf)
        blocks, kept = leaf.index_NK.shape
        rows = [np.sort(draw.permutation(area)[:kept]) for _ in range(PEERS * blocks)]
        index = np.reshape(rows, (PEERS, blocks, kept)).astype(leaf.index_NK.dtype)
        return Coefficients(index, numbers(leaf.value_NK))

    def is_leaf(node):
        return isinstance(node, Coefficients)

    return jax.tree.map(random_bits, like, optimizer.areas(theta), is_leaf=is_leaf)


def rule_merge(rule: Callable) -> tuple[Callable, tuple]:
    """A rule of aggregation, and five peers' values, one of whom is absent."""
    draw = np.random.default_rng(0).standard_normal
    shapes = {"embed": (33, 17), "a": (64, 80), "b": (70,)}
    values = {name: draw((5, *shape)).astype(np.float32) for name, shape in shapes.items()}
    weight = jnp.array([3, 2, 0, 4, 1], jnp.int32)
    return lambda values, weight, step: rule(values, weight), (values, weight, jnp.int32(1))


def learning_rates(schedule: Callable) -> tuple[Callable, tuple]:
    """The learning rates of 110 steps."""
    return lambda step: jax.vmap(schedule)(step + jnp.arange(110)), (jnp.int32(1),)


MERGES: dict[str, Callable[[], tuple[Callable, tuple]]] = {
    **{n: lambda n=n: optimizer_merges(make(n)) for n in (*OPTIMIZERS, *WITH_PARTS)},
    **{n: lambda make=make: optimizer_merges(make()) for n, make in STACKED.items()},
    **{f"rule_{n}": lambda make=make: rule_merge(make(1)) for n, make in RULES.items()},
    **{f"rate_{n}": partial(learning_rates, rate) for n, rate in SCHEDULES.items()},
}


def main(names: list[str]) -> None:
    for name in names:
        function, arguments = MERGES[name]()
        result = jax.jit(same_bits(function))(*arguments)
        content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(result))
        print(name, hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1:] or list(MERGES))
