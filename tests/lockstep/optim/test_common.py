"""Behaviour that every optimizer shares: where it rests, what repeats, who counts for what."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.optim.aggregation import median
from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.dense import sgd
from lockstep.optim.local.local_steps import diloco, outer_sgd
from lockstep.optim.local.sparseloco import sparseloco
from lockstep.optim.local.sparta import sparta, sparta_diloco
from lockstep.optim.optimizer import RoundPeers
from lockstep.optim.transform import all_gather, as_transform
from tests.lockstep.optim.compiled import compiled
from tests.lockstep.optim.optimizers import (
    LOCAL_ADAMW,
    OPTIMIZERS,
    PEERS,
    RATE,
    REST,
    STREAMED,
    each_optimizer,
    make,
    target,
)
from tests.lockstep.optim.quadratic import gradient, states, step

made = cache(make)  # whose programs are compiled once for all tests
TARGETS = jax.vmap(target)(jnp.arange(PEERS))


def train(name: str, steps: int) -> dict:
    optimizer, params = made(name), jax.tree.map(jnp.zeros_like, target(0))
    state, compiled_before = states(optimizer, params, PEERS), step._cache_size()
    for _ in range(steps):
        params, state = step(optimizer, params, state, TARGETS)
    assert step._cache_size() <= compiled_before + 1  # nothing recompiles between steps
    return params


@each_optimizer
def test_comes_to_rest_where_only_all_peers_together_know(name):
    """Where each peer normalizes its own gradients, by signs or by Adam, that is the median."""
    params, rest = train(name, 400), REST[OPTIMIZERS[name][0]]
    error = optax.tree.norm(jax.tree.map(jnp.subtract, params, rest))
    assert error < 0.03 * optax.tree.norm(rest)  # mean and median are three times as far apart


@each_optimizer
def test_same_steps_give_the_same_bits(name):
    jax.tree.map(np.testing.assert_array_equal, train(name, 5), train(name, 5))


@cache
def sent(name: str) -> tuple:
    """Compiled functions, the first messages of three peers, and what they are received with."""
    optimizer = compiled(make(name))
    params = jax.tree.map(jnp.zeros_like, target(0))
    own, shared = optimizer.init(params)
    messages = []
    for peer in range(3):
        after = optimizer.accumulate(target(peer), own, params, 1)
        messages.append(optimizer.send(after, params, shared, 1)[0])

    def receive(rows: list, weights: list[int]) -> tuple:
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
        return optimizer.receive(
            stacked, RoundPeers.synchronous(jnp.int32(weights)), params, shared, 1
        )

    return messages, receive


@each_optimizer
def test_an_absent_peer_changes_nothing_whatever_its_row_holds(name):
    (first, second, third), receive = sent(name)
    spoilt = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.dtype == jnp.float32 else x, second
    )
    expected = receive([first, third], [2, 3])
    for absent in (second, spoilt):
        found = receive([first, absent, third], [2, 0, 3])
        jax.tree.map(np.testing.assert_array_equal, found, expected)


EACH_ONCE = ("sgd_median", "distro", "distro_real_values")


@each_optimizer
def test_peers_count_by_what_they_were_assigned_but_for_a_median_and_for_coefficients(name):
    (first, second, _), receive = sent(name)
    found = receive([first, second], [1, 2])
    if name not in EACH_ONCE:
        expected = receive([first, second, second], [1, 1, 1])
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), found, expected)
    else:
        expected = receive([first, second], [1, 1])
        jax.tree.map(np.testing.assert_array_equal, found, expected)


OF_MEDIAN = {
    "sgd": lambda: sgd(0.1, aggregate=median),
    "diloco": lambda: diloco(LOCAL_ADAMW, outer_sgd(0.7, aggregate=median), inner_steps=4),
    "sparseloco": lambda: sparseloco(
        LOCAL_ADAMW, inner_steps=4, outer_learning_rate=1.0, error_feedback=0.95, topk=32, chunk=8,
        aggregate=median,
    ),
    "sparta_diloco": lambda: sparta_diloco(
        sparta(LOCAL_ADAMW, inner_steps=4, share=0.25, seed=0, aggregate=median), STREAMED,
        outer_every=3, aggregate=median,
    ),
    "distro": lambda: distro(
        CompressedMomentum(RATE, Compressor(8, 8, False, jnp.float32), 0.9, aggregate=median)
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", OF_MEDIAN)
def test_one_of_three_peers_moves_no_median(name):
    """Every optimizer that takes an aggregate reduces what peers send by nothing else."""
    optimizer = OF_MEDIAN[name]()
    params = jax.tree.map(jnp.zeros_like, target(0))
    own, shared = optimizer.init(params)
    message, _ = optimizer.send(optimizer.accumulate(target(0), own, params, 1), params, shared, 1)
    lie = jax.tree.map(lambda x: x * 1e6 if x.dtype == jnp.float32 else x, message)

    @jax.jit
    def receive(*rows):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
        peers = RoundPeers.synchronous(jnp.ones(3, jnp.int32))
        return optimizer.receive(stacked, peers, params, shared, 1)

    found, expected = receive(message, lie, message), receive(message, message, message)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert float(optax.tree.norm(found[0])) > 0


PEER, COPY = jax.sharding.PartitionSpec("peer"), jax.sharding.PartitionSpec()


@pytest.mark.parametrize(
    "name, to, out",
    [*((name, "varying", PEER) for name in OPTIMIZERS), ("distro", "invarying", COPY)],
)
def test_inside_shard_map_gives_the_same_params_as_vmap(name, to, out):
    optimizer = make(name)
    tx = as_transform(optimizer, all_gather("peer", to=to), lookahead=True)
    start = jax.tree.map(jnp.zeros_like, target(0))
    mesh = jax.make_mesh((PEERS,), ("peer",), axis_types=(jax.sharding.AxisType.Auto,))
    steps = optimizer.inner_steps

    def one(peer):
        def take(_, before):
            params, state = before
            grads = gradient(optimizer, params, state, target(peer[0]))
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        before = start, tx.init(start)
        # a loop compiles one step; without one, check_vma sees what varies
        after = take(0, before) if steps == 1 else jax.lax.fori_loop(0, steps, take, before)
        return jax.tree.map(lambda x: x[None], after[0])

    shard = jax.shard_map(one, mesh=mesh, in_specs=PEER, out_specs=out, check_vma=steps == 1)
    found = jax.jit(shard)(jnp.arange(PEERS))
    expected = train(name, steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6), found, expected)
