"""SGD and Muon against NumPy float64, written from the equations alone; AdamW is optax's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lockstep.optim.dense import adamw, dense, from_optax, muon, sgd
from lockstep.optim.local.local_steps import local_steps
from lockstep.optim.transform import alone, as_transform
from tests.lockstep.optim.compiled import Peers
from tests.lockstep.optim.optimizers import target

SETTINGS = {"momentum": 0.9, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALE = {"layers": 0.5, "head": 2.0}
RATE = 0.02
SHAPES = {"layers": {"w": (3, 6, 4), "norm": (3, 4)}, "head": {"kernel": (6, 5)}, "norm": (4,)}


def test_adamw_alone_is_optax_adamw():
    rate, wd = 0.01, 0.1
    mine = as_transform(adamw(lambda _: rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=wd), alone)
    theirs = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=wd)
    params = [target(0), target(0)]
    states = [mine.init(params[0]), theirs.init(params[1])]
    for _ in range(5):
        for i, tx in enumerate((mine, theirs)):
            grads = jax.tree.map(jnp.sin, params[i])
            updates, states[i] = tx.update(grads, states[i], params[i])
            params[i] = optax.apply_updates(params[i], updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *params)


@pytest.mark.parametrize("whole", [optax.sgd(0.5), optax.lion(1e-3), optax.contrib.muon(0.1)])
def test_a_direction_goes_up_and_a_whole_optimizer_down(whole):
    with pytest.raises(ValueError, match=r"direction goes down the gradient.*from_optax"):
        dense(0.1, whole)
    with pytest.raises(ValueError, match=r"optimizer goes up the gradient.*optax.adam\(1e-3\)"):
        from_optax(optax.scale_by_lion())
    with pytest.raises(ValueError, match="inner is .*, expected an Optimizer: from_optax"):
        local_steps(whole, sgd(1.0), inner_steps=2)
    local_steps(from_optax(whole), sgd(1.0), inner_steps=2)


@pytest.mark.parametrize("make", [lambda **settings: adamw(RATE, **settings),
                                  lambda betas, eps, **rest: sgd(RATE, **rest)])  # fmt: skip
def test_steps_and_weight_decay_are_scaled_by_group(make):
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda shape: rng.normal(size=shape).astype(np.float32), SHAPES,
                          is_leaf=lambda x: isinstance(x, tuple))  # fmt: skip
    settings = {"betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    plain, by_group = (Peers(make(**settings, **scale), params)
                       for scale in ({}, {"step_scale": SCALE}))  # fmt: skip
    grads = jax.tree.map(np.cos, params)
    found, scaled = (peers.receive([grads], 1) for peers in (plain, by_group))
    for group, factor in {"layers": 0.5, "head": 2.0, "norm": 1.0}.items():
        jax.tree.map(
            lambda x, y, factor=factor: np.testing.assert_allclose(factor * x, y, rtol=1e-6),
            found[group], scaled[group],
        )  # fmt: skip


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_every_step_of_sgd_is_the_equations(momentum, nesterov):
    rng = np.random.default_rng(0)
    theta, history = rng.normal(size=(6, 4)).astype(np.float32), []
    peers = Peers(sgd(0.1, momentum=momentum, nesterov=nesterov, weight_decay=0.05), {"w": theta})
    for step in range(1, 5):
        grads = rng.normal(size=(3, 6, 4)).astype(np.float32)
        here = [1, int(step != 2), 1]
        peers.receive([{"w": g} for g in grads], step, here)
        history.append(grads[np.array(here) > 0].astype(np.float64).mean(axis=0))
        m = sum(momentum**age * g for age, g in enumerate(reversed(history)))
        d = history[-1] + momentum * m if nesterov else m
        theta = theta - 0.1 * (d + 0.05 * theta.astype(np.float64))
        np.testing.assert_allclose(peers.params["w"], theta, rtol=0, atol=1e-6)


def orthogonal(x: np.ndarray) -> np.ndarray:
    """Newton and Schulz's polynomial on the singular values, which is what its products come to."""
    left, values, right = np.linalg.svd(x, full_matrices=False)
    values = values / np.linalg.norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return (left * values) @ right * np.sqrt(max(x.shape))


def adam(history: list[np.ndarray]) -> np.ndarray:
    """Adam's direction after these gradients, its moments written out as weighted means."""
    b1, b2 = SETTINGS["betas"]
    age = np.arange(len(history))[::-1]
    m = np.tensordot(b1**age / sum(b1**age), history, axes=1)
    v = np.tensordot(b2**age / sum(b2**age), np.square(history), axes=1)
    return m / (np.sqrt(v) + SETTINGS["eps"])


def test_every_step_of_muon_is_the_equations():
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    shape = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(draw, SHAPES, is_leaf=shape)
    expected = jax.tree.map(np.float64, params)
    history: list[dict] = []
    peers = Peers(muon(RATE, **SETTINGS, step_scale=SCALE, stacked=("layers",)), params)
    for step in range(1, 5):
        grads = jax.tree.map(draw, SHAPES, is_leaf=shape)
        peers.receive([grads], step)
        history.append(jax.tree.map(np.float64, grads))

        def move(path, theta):
            names = [entry.key for entry in path]
            seen = history
            for name in names:
                seen = [tree[name] for tree in seen]
            if names == ["layers", "w"]:
                momentum = sum(SETTINGS["momentum"] ** i * g for i, g in enumerate(seen[::-1]))
                d = np.stack([orthogonal(x) for x in seen[-1] + SETTINGS["momentum"] * momentum])
            else:
                d = adam(seen)
            d = d + SETTINGS["weight_decay"] * theta
            return theta - RATE * SCALE.get(names[0], 1.0) * d

        expected = jax.tree.map_with_path(move, expected)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), peers.params, expected
        )
