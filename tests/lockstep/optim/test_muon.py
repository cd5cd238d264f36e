"""Muon against NumPy float64, written from the equations alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep.optim.dense import muon
from lockstep.optim.transform import as_transform

SETTINGS = {"momentum": 0.9, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALE = {"layers": 0.5, "head": 2.0}
RATE = 0.02
SHAPES = {"layers": {"w": (3, 6, 4), "norm": (3, 4)}, "head": {"kernel": (6, 5)}, "norm": (4,)}


def gather_alone(message, step):
    del step
    return message, jax.tree.map(lambda x: x[None], message)


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


def test_every_step_is_the_equations():
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    shape = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(draw, SHAPES, is_leaf=shape)
    expected = jax.tree.map(np.float64, params)
    history: list[dict] = []
    tx = as_transform(muon(RATE, **SETTINGS, step_scale=SCALE, stacked=("layers",)), gather_alone)
    tx = optax.GradientTransformation(tx.init, jax.jit(tx.update))
    state = tx.init(params)
    for _ in range(4):
        grads = jax.tree.map(draw, SHAPES, is_leaf=shape)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
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
            d = d * SCALE.get(names[0], 1.0)
            return theta - RATE * (d + SETTINGS["weight_decay"] * theta)

        expected = jax.tree.map_with_path(move, expected)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), params, expected
        )


def test_layers_converge_to_what_pulls_them():
    target = jax.random.normal(jax.random.key(0), (2, 6, 4))
    rate = optax.linear_schedule(0.03, 0.0, 400)
    tx = as_transform(
        muon(rate, **SETTINGS | {"weight_decay": 0.0}, step_scale={}, stacked=("layers",)),
        gather_alone,
    )
    params = {"layers": jnp.zeros_like(target)}
    state, step = tx.init(params), jax.jit(tx.update)
    for _ in range(400):
        updates, state = step({"layers": params["layers"] - target}, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["layers"], target, atol=0.05)
