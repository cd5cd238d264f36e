"""Normalized gradients against Adafactor's estimate in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.compressed.ada_distro import normalized
from lockstep.optim.optimizer import Optimizer
from tests.lockstep.optim.compressed.reference import SecondMoment


def last_gradient() -> Optimizer:
    """An optimizer whose state is the last gradient it was given, and whose message too."""
    return Optimizer(
        init=lambda params: (params, {}),
        accumulate=lambda grads, own, params, step: grads,
        send=lambda own, params, shared, step: (own, own),
        receive=lambda messages, weight, params, shared, step: (params, shared),
        areas=lambda params: params,
    )


SHAPES = {"w": (6, 4), "v": (5,), "layers": (3, 6, 4), "x": (3, 6, 4)}


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_gradients_are_divided_by_the_factored_estimate(scale):
    rng = np.random.default_rng(0)
    params = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    optimizer = normalized(last_gradient(), 0.9)
    own, _ = optimizer.init(params)
    references = {name: SecondMoment(0.9) for name in SHAPES}
    for step in (1, 2, 3, 4):
        grads = {
            n: scale * rng.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()
        }
        own = optimizer.accumulate(grads, own, params, step)
        for name, reference in references.items():
            expected = reference.normalized(grads[name].astype(np.float64))
            np.testing.assert_allclose(own.optimizer[name], expected, rtol=1e-5)
        own = optimizer.send(own, params, {}, step)[1]  # the estimates stay


def test_vectors_of_layers_are_not_matrices():
    params = {"layers": jnp.zeros((3, 5)), "w": jnp.zeros((3, 5))}
    optimizer = normalized(last_gradient(), 0.9, stacked=("layers",))
    second = optimizer.init(params)[0].second
    assert second["layers"].element.shape == (3, 5)
    assert (second["w"].row.shape, second["w"].column.shape) == ((3, 1), (1, 5))


def test_what_never_had_a_gradient_stays_as_it_is():
    params = {"w": jnp.zeros((4, 3)), "v": jnp.zeros(3)}
    optimizer = normalized(last_gradient(), 0.95)
    own = optimizer.accumulate(params, optimizer.init(params)[0], params, 1)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf, 0), own.optimizer)
    one_row = {"w": jnp.zeros((4, 3)).at[1].set(1e-3), "v": jnp.zeros(3)}
    found = optimizer.accumulate(one_row, own, params, 2).optimizer["w"]
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[np.array([0, 2, 3])], 0)


def test_clipping_comes_before_normalization():
    params = {"w": jnp.zeros((4, 3))}
    plain = normalized(last_gradient(), 0.9)
    clipping = normalized(last_gradient(), 0.9, clip_grad_norm=1.0)
    found, expected = clipping.init(params)[0], plain.init(params)[0]
    for step, size in ((1, 0.01), (2, 100.0)):
        g = jax.random.normal(jax.random.key(step), (4, 3))
        g = size * g / jnp.linalg.norm(g)
        found = clipping.accumulate({"w": g}, found, params, step)
        expected = plain.accumulate(
            {"w": g * min(1.0, 1.0 / (size + 1e-6))}, expected, params, step
        )
    np.testing.assert_allclose(found.optimizer["w"], expected.optimizer["w"], rtol=1e-5)
