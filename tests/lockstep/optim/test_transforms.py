"""As an optax user has them: transforms in chains, of Flax modules, with any tree of params."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.dense import muon, sgd
from lockstep.optim.local.local_steps import diloco, outer_sgd
from lockstep.optim.transform import all_gather, alone, as_transform, lookahead_params
from tests.errors import refused
from tests.lockstep.optim.optimizers import (
    LOCAL_RATE,
    OPTIMIZERS,
    PEERS,
    WITH_PARTS,
    each_optimizer,
    make,
    target,
)

TABLES = {  # by name: of the settings that change, a transform
    "muon": lambda rate, clip: muon(
        rate, momentum=0.9, betas=(0.9, 0.95), eps=1e-8, weight_decay=rate, clip_grad_norm=clip,
        step_scale={},
    ),
    "sgd": lambda rate, clip: sgd(
        rate, momentum=clip, nesterov=True, weight_decay=rate, clip_grad_norm=clip
    ),
    "diloco": lambda rate, clip: diloco(
        sgd(rate, weight_decay=rate, clip_grad_norm=clip),
        outer_sgd(rate, momentum=clip, nesterov=True), inner_steps=3,
    ),
    "distro": lambda rate, clip: distro(
        CompressedMomentum(rate, Compressor(4, 8, True), 0.9, rate, clip)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_it_trains_a_flax_module_with_hyperparams_that_change(name):
    """Variables, not arrays, are what a Flax optimizer begins with."""

    def make(rate, clip):
        return as_transform(TABLES[name](rate, clip), alone, lookahead=True)

    def train(tx):
        module = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)

        @nnx.jit
        def step(module, optimizer):
            graph, params = nnx.split(module)
            ahead = lookahead_params(TABLES[name](0.02, 0.5), params, optimizer.opt_state)
            loss = lambda module: (module(jnp.ones(8)) ** 2).mean()  # noqa: E731
            optimizer.update(module, nnx.grad(loss)(nnx.merge(graph, ahead)))

        for _ in range(3):
            step(module, optimizer)
        return nnx.to_pure_dict(nnx.state(module)), optimizer.opt_state

    params, state = train(optax.inject_hyperparams(make)(rate=0.02, clip=0.5))
    expected, plain = train(make(0.02, 0.5))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)
    assert state.hyperparams["rate"][...] == np.float32(0.02)
    assert plain.steps_taken[...] == 3


@each_optimizer
def test_the_steps_taken_are_found_in_any_chain_and_adams_count_as_in_optax(name):
    params = {"w": jnp.zeros((8, 16)), "b": jnp.zeros(16)}
    tx = as_transform(make(name), alone, lookahead=True)
    state = jax.eval_shape(tx.init, params)
    adam = optax.tree.get(state, "ScaleByAdamState")
    assert optax.tree.get(state, "count") is (adam and adam.count)
    for wrapped in (
        optax.chain(optax.clip_by_global_norm(1.0), tx),
        optax.MultiSteps(tx, 2).gradient_transformation(),
        optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(1.0),
    ):
        found = optax.tree.get(jax.eval_shape(wrapped.init, params), "steps_taken")
        assert (found.shape, found.dtype) == ((), jnp.int32)


@each_optimizer
def test_an_optimizer_that_looks_ahead_is_no_transform_unless_gradients_are_taken_there(name):
    optimizer = make(name)
    assert optimizer.looks_ahead == (optimizer.inner_steps > 1)
    if optimizer.looks_ahead:
        there = r"True, and gradients at lookahead_params\(optimizer, params, state\)"
        with pytest.raises(ValueError, match=f"lookahead is False, expected {there}"):
            as_transform(optimizer, alone)
    else:
        as_transform(optimizer, alone)


def test_overlap_looks_ahead_too():
    overlapped = distro(CompressedMomentum(1, Compressor(4, 8, True), 0.9), 1)
    with refused("lookahead", "False", "True", error=ValueError):
        as_transform(overlapped, alone)


def test_params_ahead_come_in_the_tree_of_the_params_out_of_any_chain():
    optimizer = make("fedavg")
    tx = optax.chain(optax.identity(), as_transform(optimizer, alone, lookahead=True))
    params = (jnp.ones(3), [jnp.zeros(2)])
    state = tx.init(params)
    updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
    ahead = lookahead_params(optimizer, params, state)
    jax.tree.map(lambda a, p: np.testing.assert_allclose(a, p - LOCAL_RATE(0.25)), ahead, params)
    with refused("state", "tuple", "OptimizerState", error=ValueError):
        lookahead_params(optimizer, params, (optax.EmptyState(),))


@each_optimizer
def test_a_state_can_be_given_away_and_the_params_stay(name):
    params = jax.tree.map(jnp.zeros_like, target(0))
    state = as_transform(make(name), alone, lookahead=True).init(params)
    kept, given = ({x.unsafe_buffer_pointer() for x in jax.tree.leaves(t)} for t in (params, state))
    assert not kept & given


@each_optimizer
def test_a_tree_without_leaves_is_left_alone(name):
    tx = as_transform(make(name), alone, lookahead=True)
    for params, wrapped in (({}, tx), ({"w": jnp.ones(3)}, optax.masked(tx, {"w": False}))):
        updates, _ = wrapped.update(params, wrapped.init(params), params)
        jax.tree.map(np.testing.assert_array_equal, updates, params)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *WITH_PARTS])
def test_a_param_without_elements_is_no_trouble_or_named(name):
    tx = as_transform(make(name), alone, lookahead=True)
    params = {"w": jnp.zeros((0, 4)), "b": jnp.ones(8)}
    try:
        state = jax.eval_shape(tx.init, params)
        updates, after = jax.eval_shape(tx.update, params, state, params)
    except ValueError as error:
        assert str(error) == "params['w'] has the shape (0, 4), expected elements in it"
        return
    for before, now in ((params, updates), (state, after)):
        assert [x.shape for x in jax.tree.leaves(now)] == [x.shape for x in jax.tree.leaves(before)]


def test_a_peer_whose_gradient_is_not_finite_is_absent_and_keeps_its_state():
    tx = as_transform(TABLES["distro"](0.02, 0.5), all_gather("peer"))
    params = jax.tree.map(jnp.zeros_like, target(0))

    @jax.jit
    @partial(jax.vmap, axis_name="peer", in_axes=(0, 0, None))
    def step(state, peer, spoilt):
        grads = jax.tree.map(jnp.subtract, params, target(peer))
        grads["b"] = jnp.where((peer == 1) & spoilt, jnp.nan, grads["b"])
        return tx.update(grads, state, params)

    start = jax.vmap(lambda _: tx.init(params))(jnp.arange(PEERS))
    _, state = step(start, jnp.arange(PEERS), False)
    updates, after = step(state, jnp.arange(PEERS), True)
    for before, now in zip(*map(jax.tree.leaves, (state.own, after.own)), strict=True):
        np.testing.assert_array_equal(before[1], now[1])
        assert (before[0] != now[0]).any()
    for leaf in jax.tree.leaves(updates):
        assert np.isfinite(leaf).all() and leaf.any()
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[0], leaf.shape))
