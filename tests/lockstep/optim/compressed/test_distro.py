"""DisTrO against its equations in float64, and what its mathematics promises."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from tests.lockstep.optim.compiled import Peers, compiled
from tests.lockstep.optim.compressed.reference import Distro, blocks_of, decode

LR = 0.01
BASE = {
    "decay": 0.9, "topk": 3, "chunk": 8, "one_bit": True, "wd": 0.1, "clip": 1.0, "overlap": 0,
}  # fmt: skip
CASES = {
    "matrix": ((16, 24), {}),
    "real values": ((16, 24), {"one_bit": False}),
    "vector": ((40,), {}),
    "vector of prime length": ((13,), {}),
    "three axes": ((3, 8, 16), {}),
    "three axes, the last two prime": ((2, 11, 13), {"one_bit": False}),
    "topk larger than a block": ((6, 6), {"topk": 100}),
    "no decay": ((16, 8), {"decay": 1.0}),
    "no clipping, no weight decay": ((16, 8), {"clip": None, "wd": 0.0}),
    "steps scaled": ((16, 8), {"scale": 0.25}),
}
EACH = (
    [(name, 2, 0) for name in CASES]
    + [
        (name, peers, overlap)
        for name in ("matrix", "real values", "three axes, the last two prime")
        for peers, overlap in ((1, 0), (8, 0), (1, 1), (2, 1), (2, 2), (8, 2))
    ]
    + [("steps scaled", 2, 2)]
)


def lr(step):
    return LR / (step + 1)


def optimizer_of(settings: dict):
    """Compiled once for cases that differ in the number of peers."""
    return made(tuple(settings.items()))


@cache
def made(items: tuple):
    settings = dict(items)
    compressor = Compressor(
        settings["topk"], settings["chunk"], settings["one_bit"], value_dtype=jnp.float32
    )
    momentum = CompressedMomentum(
        lr,
        compressor,
        compression_decay=settings["decay"],
        weight_decay=settings["wd"],
        clip_grad_norm=settings["clip"],
        step_scale={"w": settings.get("scale", 1.0)},
    )
    return compiled(distro(momentum, settings["overlap"]))


def array_of(coefficients, settings: dict) -> np.ndarray:
    """The array that coefficients stand for, in float64."""
    rows = np.asarray(coefficients, np.float64)
    found = np.zeros(rows.shape)
    for cut in blocks_of(rows.shape, settings["chunk"]):
        found[cut] = decode(rows[cut])
    return found


def sign_is_sure(decoded):
    """Where a decoded value is within rounding of zero, its sign is anyone's."""
    return np.abs(decoded) > 1e-6 if decoded.any() else np.ones(decoded.shape, bool)


def expect_like_reference(shape, settings, peers, grads_of):
    rng = np.random.default_rng(peers)
    theta = rng.normal(size=shape).astype(np.float32)
    reference, optimizer = Distro(theta, peers, **settings), optimizer_of(settings)
    all_peers = Peers(optimizer, {"w": jnp.asarray(theta)}, peers)
    for step in (1, 2, 3, 4):
        before = np.asarray(all_peers.params["w"], np.float64)
        for peer in range(peers):
            there = all_peers.ahead(peer, step)["w"]
            expected = reference.lookahead(peer, lr(step - 1))
            sure = sign_is_sure(reference.delta[peer])
            np.testing.assert_allclose(
                np.where(sure, there, 0), np.where(sure, expected, 0), atol=1e-6
            )
        grads = grads_of(rng, (peers, *shape)).astype(np.float32)
        for peer in range(peers):
            all_peers.accumulate(peer, {"w": grads[peer]}, step)
        messages = [all_peers.send(peer, step) for peer in range(peers)]
        all_peers.receive(messages, step)
        sent = reference.round(grads, lr(step), lr(step + 1))
        for peer in range(peers):
            found = np.asarray(messages[peer]["w"].index_NK)
            assert found.tolist() == [list(places) for places in sent[peer]]
            delta = array_of(all_peers.own[peer].delta["w"], settings)
            scale = np.abs(reference.delta).max() + np.abs(reference.own_results).max()
            np.testing.assert_allclose(delta, reference.delta[peer], rtol=1e-6, atol=1e-6 * scale)
        sure = sign_is_sure(reference.applied)
        decayed = before * (1 - lr(step) * settings.get("scale", 1.0) * settings["wd"])
        moved, expected = np.asarray(all_peers.params["w"]) - decayed, reference.theta - decayed
        np.testing.assert_allclose(moved[sure], expected[sure], rtol=1e-6, atol=1e-6)
        reference.theta = np.asarray(all_peers.params["w"], np.float64)


@pytest.mark.parametrize("name, peers, overlap", EACH)
def test_rounds_follow_the_equations_in_float64(name, peers, overlap):
    shape, changes = CASES[name]
    settings = BASE | changes | {"overlap": overlap}
    expect_like_reference(shape, settings, peers, lambda rng, size: rng.normal(size=size))


@pytest.mark.parametrize("peers", [1, 2, 8])
def test_ties_and_zeros_follow_the_equations(peers):
    def first_corner_of_each_block(rng, size):
        # one element of a block of 2 x 2 gives four coefficients of one magnitude, exactly
        grads = np.zeros(size)
        grads[..., ::2, ::2] = rng.choice([-1.0, 1.0], size=grads[..., ::2, ::2].shape)
        return grads

    settings = BASE | {"topk": 2, "chunk": 2, "clip": None}
    expect_like_reference((6, 8), settings, peers, first_corner_of_each_block)
    expect_like_reference((6, 8), settings, peers, lambda rng, size: np.zeros(size))


# ---- Blocks of zeros ----


def some_steps(skip: bool, overlap: int) -> dict:
    """Params after some rounds of two peers, of which `none` has no gradient and `half` at one."""
    compressor = Compressor(3, 4, True, skip_zero_blocks=skip)
    params = {name: jnp.ones((8, 100)) for name in ("all", "half", "none")}
    peers = Peers(distro(CompressedMomentum(LR, compressor, 0.9), overlap), params, 2)
    for step in range(1, 4):
        for peer in range(2):
            drawn = jax.random.normal(jax.random.key(10 * step + peer), (8, 100))
            peers.accumulate(peer, {"all": drawn, "half": drawn * peer, "none": drawn * 0}, step)
        peers.receive([peers.send(peer, step) for peer in range(2)], step)
    return peers.params


@pytest.mark.long
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_block_without_any_gradient_stays_only_if_zeros_are_not_sent(overlap):
    sent, skipped = (some_steps(skip, overlap) for skip in (False, True))
    np.testing.assert_array_equal(skipped["none"], 1.0)
    applied = 3 - overlap
    np.testing.assert_allclose(jnp.abs(sent["none"] - 1.0).max(), applied * LR, rtol=1e-4)
    np.testing.assert_array_equal(sent["all"], skipped["all"])
    assert (sent["half"] != skipped["half"]).any()  # the peer that has one decides alone
