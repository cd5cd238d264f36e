"""DisTrO against its equations in float64, and what its mathematics promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.optim.distro import distro
from tests.pipeline.optim.reference import Distro

LR = 0.01
BASE = {"decay": 0.9, "topk": 3, "chunk": 8, "one_bit": True, "wd": 0.1, "clip": 1.0}
CASES = {
    "matrix": ((16, 24), {}),
    "real values": ((16, 24), {"one_bit": False}),
    "vector": ((40,), {}),
    "three axes": ((3, 8, 16), {}),
    "prime sides": ((11, 13), {}),
    "topk larger than a block": ((6, 6), {"topk": 100}),
    "no decay": ((16, 8), {"decay": 1.0}),
    "no clipping, no weight decay": ((16, 8), {"clip": None, "wd": 0.0}),
}


def optimizer_of(settings: dict):
    return distro(
        lambda step: LR / step,
        compression_decay=settings["decay"],
        compression_topk=settings["topk"],
        compression_chunk=settings["chunk"],
        quantize_1bit=settings["one_bit"],
        weight_decay=settings["wd"],
        clip_grad_norm=settings["clip"],
    )


def take_round(optimizer, params, own, shared, grads, step):
    messages = []
    for peer in range(len(own)):
        own[peer] = optimizer.inner({"w": grads[peer]}, own[peer], params, step)
        message, own[peer] = optimizer.send(own[peer], params, shared, step)
        messages.append(message)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *messages)
    updates, shared = optimizer.receive(stacked, jnp.ones(len(own), bool), params, shared, step)
    return jax.tree.map(jnp.add, params, updates), messages


@pytest.mark.parametrize(
    "name, peers", [(name, 2) for name in CASES] + [("matrix", 1), ("real values", 8)]
)
def test_rounds_follow_the_equations_in_float64(name, peers):
    shape, changes = CASES[name]
    settings = BASE | changes
    rng = np.random.default_rng(peers)
    theta = rng.normal(size=shape).astype(np.float32)
    reference, optimizer = Distro(theta, peers, **settings), optimizer_of(settings)
    params = {"w": jnp.asarray(theta)}
    first_own, shared = optimizer.init(params)
    own = [first_own] * peers
    for step in (1, 2, 3):
        grads = rng.normal(size=(peers, *shape)).astype(np.float32)
        before = np.asarray(params["w"])
        params, messages = take_round(optimizer, params, own, shared, grads, jnp.int32(step))
        sent, mean = reference.round(grads, LR / step)
        for peer in range(peers):
            found = np.asarray(messages[peer]["w"].index_NK)
            assert found.tolist() == [list(places) for places in sent[peer]]
            norm = np.linalg.norm(np.asarray(own[peer]["delta"]["w"], np.float64))
            np.testing.assert_allclose(
                norm, np.linalg.norm(reference.delta[peer]), rtol=1e-5, atol=1e-7
            )
        # where the decoded mean is within rounding of zero, its sign is anyone's
        sure = np.abs(mean) > 1e-6
        moved = np.asarray(params["w"]) - before * (1 - LR / step * settings["wd"])
        np.testing.assert_array_equal(-np.sign(moved)[sure], np.sign(mean)[sure])
        reference.theta = np.asarray(params["w"], np.float64)


def test_what_is_sent_and_what_is_left_add_up_to_the_gradients():
    settings = BASE | {"decay": 1.0, "one_bit": False, "clip": None}
    optimizer = optimizer_of(settings)
    params = {"w": jnp.zeros((16, 16))}
    own, shared = optimizer.init(params)
    total = np.zeros((4, 64))
    for step in (1, 2, 3, 4):
        grad = {"w": jax.random.normal(jax.random.key(step), (16, 16))}
        alone, _ = optimizer.init(params)
        total += np.asarray(optimizer.inner(grad, alone, params, step)["delta"]["w"])
        own = optimizer.inner(grad, own, params, step)
        message, own = optimizer.send(own, params, shared, step)
        np.put_along_axis(
            rest := np.zeros((4, 64)),
            np.asarray(message["w"].index_NK, int),
            message["w"].value_NK,
            1,
        )
        total -= rest
    np.testing.assert_allclose(total, own["delta"]["w"], atol=1e-6)


def test_compare_is_zero_for_the_own_message_and_large_for_a_flipped_one():
    optimizer = optimizer_of(BASE)
    params = {"w": jnp.zeros((16, 16))}
    own, shared = optimizer.init(params)
    own = optimizer.inner({"w": jax.random.normal(jax.random.key(0), (16, 16))}, own, params, 1)
    message, after = optimizer.send(own, params, shared, 1)
    distance, compared = optimizer.compare(own, message)
    assert distance == 0
    jax.tree.map(np.testing.assert_array_equal, compared, after)
    flipped = {"w": message["w"]._replace(value_NK=~message["w"].value_NK)}
    assert optimizer.compare(own, flipped)[0] >= 1
    moved = {"w": message["w"]._replace(index_NK=(message["w"].index_NK + 1) % 64)}
    assert optimizer.compare(own, moved)[0] > 0.2
