"""Behaviour that every optimizer shares: add a line to OPTIMIZERS and a new one is tested."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pipeline.optim.adamw import adamw
from pipeline.optim.aggregation.aggregate import equally
from pipeline.optim.aggregation.by_element import median
from pipeline.optim.compressed.ada_distro import ada_distro, normalized
from pipeline.optim.compressed.compressor import Compressor
from pipeline.optim.compressed.demo import demo
from pipeline.optim.compressed.distro import CompressedMomentum, distro
from pipeline.optim.dense import dense
from pipeline.optim.local.decoupled import decoupled_diloco
from pipeline.optim.local.diloco import diloco, outer_sgd
from pipeline.optim.local.fedavg import fedavg
from pipeline.optim.local.outer_steps import delayed_nesterov, heloco
from pipeline.optim.local.sparseloco import sparseloco
from pipeline.optim.local.sparta import sparta
from pipeline.optim.local.sparta_diloco import sparta_diloco
from pipeline.optim.local.streaming import streaming_diloco
from pipeline.optim.muon import muon
from pipeline.optim.optimizer import Optimizer, RoundPeers, clip_scale, looks_ahead
from pipeline.optim.quantize.integers import Integers
from pipeline.optim.quantize.levels import Levels
from pipeline.optim.quantize.qsgd import QSGD
from pipeline.optim.quantize.quantized import quantized
from pipeline.optim.sgd import sgd
from pipeline.optim.step_direction import StepDirection
from pipeline.optim.transform import all_gather, alone, as_transform, lookahead_params
from tests.pipeline.optim.aggregates import vote
from tests.pipeline.optim.compiled import compiled

PEERS = 4
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
    "sgd_vote": ("median", lambda: sgd(RATE, aggregate=equally(vote))),
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
    # 5 of 8: a vector's first normalized gradient is all 1 and -1, and of all peers' whole ones the
    # sum would be rounding where they disagree
    "ada_distro": ("median", lambda: ada_distro(
        CompressedMomentum(
            RATE, Compressor(5, 8, False, jnp.float32), 0.95, direction=StepDirection("orthogonal")
        ),
        0.95,
    )),
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


OFFSETS = jnp.array([-0.1, 0.0, 0.0, 0.5])  # their mean is 0.1, their median 0


def around(offset: jax.Array | float) -> dict:
    key = jax.random.key(7)
    common = {"w": jax.random.normal(key, (8, 16)), "b": jax.random.normal(key, (16,))}
    return jax.tree.map(lambda x: x + offset, common)


def target(peer: jax.Array) -> dict:
    """Each peer pulls elsewhere; only together do they know their mean, or their median."""
    return around(OFFSETS[peer])


REST = {"mean": around(OFFSETS.mean()), "median": around(jnp.median(OFFSETS))}


def gradient(optimizer, params, state, peer):
    ahead = lookahead_params(optimizer, params, state)
    return jax.tree.map(jnp.subtract, ahead, target(peer))


@cache
def programs(name: str) -> tuple[Callable, Callable]:
    """The states of all peers before the first local step, and a local step of all: compiled once
    for all tests."""
    optimizer = make(name)
    tx = as_transform(optimizer, all_gather("peer"), lookahead=True)

    @jax.jit
    def begin(params):
        return jax.vmap(lambda _: tx.init(params))(jnp.arange(PEERS))

    @jax.jit
    def step(params, state):
        def one(state, peer):
            grads = gradient(optimizer, params, state, peer)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        stepped, state = jax.vmap(one, axis_name="peer")(state, jnp.arange(PEERS))
        return jax.tree.map(lambda x: x[0], stepped), state

    return begin, step


def train(name: str, steps: int) -> dict:
    params, (begin, step) = jax.tree.map(jnp.zeros_like, target(0)), programs(name)
    state = begin(params)
    for _ in range(steps):
        params, state = step(params, state)
    assert step._cache_size() == 1  # nothing recompiles between steps
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


@each_optimizer
def test_peers_count_by_what_they_were_assigned_if_they_take_local_steps_and_else_equally(name):
    (first, second, _), receive = sent(name)
    found = receive([first, second], [1, 2])
    if make(name).inner_steps > 1:
        expected = receive([first, second, second], [1, 1, 1])
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), found, expected)
    else:
        expected = receive([first, second], [1, 1])
        jax.tree.map(np.testing.assert_array_equal, found, expected)


OF_MEDIAN = {
    "dense": lambda: dense(0.1, optax.identity(), aggregate=median),
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
    [*((name, "varying", PEER) for name in OPTIMIZERS), ("ada_distro", "invarying", COPY)],
)
def test_inside_shard_map_gives_the_same_params_as_vmap(name, to, out):
    optimizer = make(name)
    tx = as_transform(optimizer, all_gather("peer", to=to), lookahead=True)
    start = jax.tree.map(jnp.zeros_like, target(0))
    mesh = jax.make_mesh((PEERS,), ("peer",), axis_types=(jax.sharding.AxisType.Auto,))
    steps = optimizer.inner_steps

    def one(peer):
        def step(_, before):
            params, state = before
            grads = gradient(optimizer, params, state, peer[0])
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        before = start, tx.init(start)
        # a loop compiles one step; without one, check_vma sees what varies
        after = step(0, before) if steps == 1 else jax.lax.fori_loop(0, steps, step, before)
        return jax.tree.map(lambda x: x[None], after[0])

    shard = jax.shard_map(one, mesh=mesh, in_specs=PEER, out_specs=out, check_vma=steps == 1)
    found = jax.jit(shard)(jnp.arange(PEERS))
    expected = train(name, steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6), found, expected)


@pytest.mark.parametrize("name", ["distro", "diloco"])
def test_inside_pmap_gives_the_same_params_as_vmap(name):
    optimizer = make(name)
    tx, start = (
        as_transform(optimizer, all_gather("peer"), lookahead=True),
        jax.tree.map(jnp.zeros_like, target(0)),
    )

    @partial(jax.pmap, axis_name="peer")
    def one(peer):
        def step(_, before):
            params, state = before
            updates, state = tx.update(gradient(optimizer, params, state, peer), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.fori_loop(0, optimizer.inner_steps, step, (start, tx.init(start)))[0]

    found, expected = one(jnp.arange(PEERS)), train(name, optimizer.inner_steps)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-6), found, expected)


# ---- As an optax user has them ----

TABLES = {  # by name: of the settings that change, a transform
    "adamw": lambda rate, clip: adamw(
        rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=rate, clip_grad_norm=clip
    ),
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
        CompressedMomentum(rate, Compressor(4, 8, True), 0.9, rate, clip, removed=clip)
    ),
    "ada_distro": lambda rate, clip: ada_distro(
        CompressedMomentum(rate, Compressor(4, 8, True), 0.9, rate, clip), 0.95
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
    assert looks_ahead(optimizer) == (optimizer.inner_steps > 1)
    if looks_ahead(optimizer):
        there = r"True, and gradients at lookahead_params\(optimizer, params, state\)"
        with pytest.raises(ValueError, match=f"lookahead is False, expected {there}"):
            as_transform(optimizer, alone)
    else:
        as_transform(optimizer, alone)


def test_overlap_looks_ahead_too():
    momentum = CompressedMomentum(1, Compressor(4, 8, True), 0.9)
    for overlapped in (distro(momentum, 1), ada_distro(momentum, 0.95, 1)):
        with pytest.raises(ValueError, match="lookahead is False, expected True"):
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
    with pytest.raises(ValueError, match="state is tuple, expected an OptimizerState"):
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
    tx = as_transform(make("ada_distro"), all_gather("peer"))
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


def streaming(**changes) -> Optimizer:
    settings = {"inner_steps": 4, "fragments": 2, "delay": 1, "mixing": 0.0} | changes
    return streaming_diloco(sgd(1), outer_sgd(1), **settings)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: demo(1, 0.9, 0, 8, 0, alone), "compression_topk is 0, expected an integer"),
        (lambda: demo(1, 0.9, 4, 0, 0, alone), "compression_chunk is 0, expected an integer"),
        (lambda: demo(1, 1.5, 4, 8, 0, alone), "compression_decay is 1.5, expected a number"),
        (lambda: demo(1, 0.9, 4, 8, -1, alone), "weight_decay is -1, expected a number from 0"),
        (
            lambda: demo(1, 0.9, 4, 8, 0, alone).init({"w": jnp.ones((0, 4))}),
            r"params\['w'\] has the shape \(0, 4\), expected elements",
        ),
        (lambda: Compressor(4, 8, True, topk_of={"w": 0}), r"topk_of\['w'\] is 0, expected an"),
        (lambda: distro(CompressedMomentum(1, Compressor(4, 8, True), 0.9), 3), "overlap is 3"),
        (lambda: normalized(None, 1.0), "second_moment_decay is 1.0, expected a number from 0,"),
        (lambda: StepDirection("signs"), "update is 'signs', expected one of sign, rms, orth"),
        (lambda: TABLES["adamw"](1, -1.0), "clip_grad_norm is -1.0, expected a number from 0"),
        (
            lambda: sparta(sgd(1), inner_steps=1, share=0.0, seed=0),
            "share is 0.0, expected a number above 0, at most 1",
        ),
        (
            lambda: sparta(sgd(1), inner_steps=1, share=0.1, seed=0, selector="all"),
            "selector is 'all', expected one of random, shuffled, partitioned",
        ),
        (lambda: fedavg(sgd(1), inner_steps=0), "inner_steps is 0, expected an integer from 1"),
        (lambda: streaming(inner_steps=5), "inner_steps is 5, expected a multiple of 2"),
        (lambda: streaming(delay=2), "delay is 2, expected an integer from 0, below 2"),
        (lambda: streaming(mixing=1.0), "mixing is 1.0, expected a number from 0, below 1"),
        (
            lambda: fedavg(make("fedavg"), inner_steps=2),
            "inner looks ahead, expected no overlap and no local steps within",
        ),
        (lambda: sgd(1, nesterov=True), "nesterov is True, expected false without momentum"),
        (lambda: adamw(1, betas=(0.9, 1.0), eps=0, weight_decay=0), r"betas\[1\] is 1.0, exp"),
    ],
)
def test_a_setting_that_cannot_be_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_adamw_alone_is_optax_adamw():
    rate, wd = 0.01, 0.1
    mine = as_transform(
        adamw(lambda _: rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=wd),
        alone,
    )
    theirs = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=wd)
    params = [target(0), target(0)]
    states = [mine.init(params[0]), theirs.init(params[1])]
    for _ in range(5):
        for i, tx in enumerate((mine, theirs)):
            grads = jax.tree.map(jnp.sin, params[i])
            updates, states[i] = tx.update(grads, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *params)


def test_clip_scale_bounds_the_global_norm_and_leaves_small_gradients_alone():
    grads = {"a": jnp.full((3,), 3.0), "b": jnp.full((4,), 4.0)}
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(norm * clip_scale(grads, 1.0), 1.0, rtol=1e-5)
    assert clip_scale(grads, float(norm) * 2) == 1
    assert clip_scale(grads, None) == 1
