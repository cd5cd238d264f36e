"""Every optimizer as tests have it, by name: add a line to OPTIMIZERS and a new one is tested.

Four peers pull elsewhere each, so that only together they know where their mean or median is.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

from lockstep.optim.aggregation import mean, median
from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.dense import adamw, muon, sgd
from lockstep.optim.local.local_steps import diloco, fedavg, outer_sgd
from lockstep.optim.local.outer_steps import delayed_nesterov, heloco
from lockstep.optim.local.sparseloco import sparseloco
from lockstep.optim.local.sparta import sparta, sparta_diloco
from lockstep.optim.local.streaming import decoupled_diloco, streaming_diloco
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.optim.quantize import QSGD, Integers, Levels, quantized

PEERS = 4
OFFSETS = jnp.array([-0.1, 0.0, 0.0, 0.5])  # their mean is 0.1, their median 0


def around(offset: jax.Array | float) -> dict:
    key = jax.random.key(7)
    common = {"w": jax.random.normal(key, (8, 16)), "b": jax.random.normal(key, (16,))}
    return jax.tree.map(lambda x: x + offset, common)


def target(peer: jax.Array) -> dict:
    return around(OFFSETS[peer])


REST = {"mean": around(OFFSETS.mean()), "median": around(jnp.median(OFFSETS))}


def vote(values: Tree, weight: jax.Array) -> Tree:
    """The sign that most peers have, by their weights."""
    return jax.tree.map(jnp.sign, mean(jax.tree.map(jnp.sign, values), weight))


RATE = optax.linear_schedule(0.03, 0.0, 400)
LOCAL_RATE = optax.linear_schedule(0.03, 0.0, 100)  # of 400 local steps, 4 in each round
LOCAL_ADAMW = adamw(LOCAL_RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
OUTER = outer_sgd(0.7, momentum=0.6, nesterov=True)
STREAMED = outer_sgd(0.7, momentum=0.3, nesterov=True)

OPTIMIZERS = {  # name: where it comes to rest, and what makes it
    "adamw": ("mean", lambda: adamw(
        RATE,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad_norm=1.0,
    )),
    "muon": ("mean", lambda: muon(
        RATE, momentum=0.95,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip_grad_norm=1.0, step_scale={"b": 0.5},
    )),
    "sgd": ("mean", lambda: sgd(RATE, momentum=0.9, nesterov=True, clip_grad_norm=1.0)),
    "sgd_median": ("median", lambda: sgd(RATE, momentum=0.9, aggregate=median)),
    "sgd_vote": ("median", lambda: sgd(RATE, aggregate=vote)),
    "diloco": ("median", lambda: diloco(LOCAL_ADAMW, OUTER, inner_steps=4)),
    "streaming_diloco": ("median", lambda: streaming_diloco(
        LOCAL_ADAMW, quantized(STREAMED, Integers(4, 8), 0.9),
        inner_steps=12, fragments=3, delay=1, mixing=0.25,
    )),
    "decoupled_diloco": ("median", lambda: decoupled_diloco(
        LOCAL_ADAMW, delayed_nesterov(1.0, momentum=0.2, every=1),
        inner_steps=12, fragments=3, delay=1, adopt="carry",
    )),
    "decoupled_heloco": ("median", lambda: decoupled_diloco(
        LOCAL_ADAMW, heloco(
            1.0, momentum=0.3, keep=0.5, shrink=1.0, shrink_most=0.9, turn=0.2, trust=1.0
        ),
        inner_steps=12, fragments=3, delay=0, adopt="overwrite",
    )),
    "diloco_sign": ("median", lambda: diloco(
        LOCAL_ADAMW, quantized(OUTER, Levels(1, 8), 1.0), inner_steps=4,
    )),
    "sparseloco": ("median", lambda: sparseloco(
        LOCAL_ADAMW, inner_steps=4, outer_learning_rate=1.0, error_feedback=0.95, topk=32, chunk=8
    )),
    "fedavg": ("mean", lambda: fedavg(sgd(LOCAL_RATE), inner_steps=4)),
    "sparta": ("median", lambda: sparta(LOCAL_ADAMW, inner_steps=4, share=0.25, seed=0)),
    "sparta_diloco": ("median", lambda: sparta_diloco(
        sparta(LOCAL_ADAMW, inner_steps=4, share=0.25, seed=0, selector="shuffled"),
        STREAMED, outer_every=3,
    )),
    "distro": ("median", lambda: distro(CompressedMomentum(RATE, Compressor(8, 8, True), 0.9))),
    "distro_real_values": ("mean", lambda: distro(
        CompressedMomentum(RATE, Compressor(8, 8, False, jnp.float32), 0.9)
    )),
}  # fmt: skip
WITH_PARTS = {  # what else treats arrays without elements by itself
    f"quantized_{type(of).__name__}_{of.bits}": lambda of=of: quantized(sgd(RATE), of)
    for of in (Integers(4, 8), QSGD(8, 8), Levels(1, 8), Levels(2, 8))
} | {
    "sparta_partitioned": lambda: sparta(
        LOCAL_ADAMW, inner_steps=4, share=0.25, seed=0, selector="partitioned"
    )
}


def make(name: str) -> Optimizer:
    return WITH_PARTS[name]() if name in WITH_PARTS else OPTIMIZERS[name][1]()


each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
