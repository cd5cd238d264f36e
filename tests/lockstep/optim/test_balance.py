"""Corrections of routers follow the load of experts, and nothing else touches them."""

import jax
import numpy as np
import pytest

from lockstep.optim.balance import balanced, leave
from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.dense import adamw
from lockstep.programs.local_training import micro_batches
from pipeline import runfile
from pipeline.language_model.language_model import programs_of
from tests import tiny
from tests.errors import refused
from tests.lockstep.optim.compiled import Peers

PATH = "layers/router/correction"
SPEED = 0.01
INNER = {
    "adamw": adamw(0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    "distro": distro(
        CompressedMomentum(0.1, Compressor(2, 4, True, stacked=("layers",)), 0.9, weight_decay=0.1)
    ),
}
each_inner = pytest.mark.parametrize("inner", INNER.values(), ids=INNER.keys())


def drawn(seed: int) -> dict:
    """Params, or gradients; a correction's are numbers of choices: four experts, two layers."""
    rng = np.random.default_rng(seed)
    router = {"kernel": rng.normal(size=(2, 8, 4)).astype(np.float32)}
    router["correction"] = rng.integers(9, size=(2, 4)).astype(np.float32)
    return {"embed": rng.normal(size=(8, 4)).astype(np.float32), "layers": {"router": router}}


def without(tree: dict) -> dict:
    return tree | {"layers": {"router": {"kernel": tree["layers"]["router"]["kernel"]}}}


def rounds(optimizer, params: dict, present: list[list[int]], grads=drawn) -> dict:
    """The params after some rounds; peer p's gradient in round t is grads(10 * t + p)."""
    peers = Peers(optimizer, params, len(present[0]))
    for step, here in enumerate(present, start=1):
        for peer in range(len(here)):
            peers.accumulate(peer, grads(10 * step + peer), step)
        peers.receive([peers.send(peer, step) for peer in range(len(here))], step, here)
    return peers.params


PRESENT = [[1, 1, 1], [1, 0, 1], [0, 1, 0]]


@each_inner
def test_a_correction_moves_as_the_equation_says(inner):
    params = drawn(0)
    found = rounds(balanced(leave(inner, [PATH]), [PATH], SPEED), params, PRESENT)
    expected = params["layers"]["router"]["correction"].astype(np.float64)
    for step, here in enumerate(PRESENT, start=1):
        shares = []
        for peer in np.flatnonzero(here):
            load = drawn(10 * step + peer)["layers"]["router"]["correction"].astype(np.float64)
            shares.append(load / load.sum(axis=1, keepdims=True))
        share = np.mean(shares, axis=0)
        expected += SPEED * np.sign(share.mean(axis=1, keepdims=True) - share)
    np.testing.assert_allclose(found["layers"]["router"]["correction"], expected, atol=1e-6)


@each_inner
@pytest.mark.parametrize("speed", [0.0, SPEED])
def test_the_other_params_are_trained_as_if_it_were_not_there(inner, speed):
    params = drawn(0)
    chosen = leave(inner, [PATH])
    found = rounds(balanced(chosen, [PATH], speed) if speed else chosen, params, PRESENT)
    expected = rounds(inner, without(params), PRESENT, lambda seed: without(drawn(seed)))
    jax.tree.map(np.testing.assert_array_equal, without(found), expected)
    if not speed:
        correction = found["layers"]["router"]["correction"]
        np.testing.assert_array_equal(correction, params["layers"]["router"]["correction"])


def test_a_load_that_no_peer_can_have_moves_nothing_out_of_bounds():
    """None, negative ones, and some so large that their sum is infinite."""
    optimizer = balanced(leave(INNER["adamw"], [PATH]), [PATH], SPEED)
    params = drawn(0)
    before = params["layers"]["router"]["correction"]
    for load in ([0, 0, 0, 0], [-5, -1, -2, -9], [3e38, 3e38, 3e38, 3e38]):

        def grads(seed: int, load=load) -> dict:
            tree = drawn(seed)
            tree["layers"]["router"]["correction"][:] = load
            return tree

        after = rounds(optimizer, params, [[1, 1]], grads)
        np.testing.assert_array_equal(after["layers"]["router"]["correction"], before)


# ---- In a model ----


def a_run() -> runfile.Run:
    document = tiny.run_document("nowhere", peers__balance_speed=SPEED)
    return runfile.parse(document.unwrap(), "run.toml")


def test_the_load_is_of_the_sequences_that_the_peer_was_assigned():
    """Neither of those that fill up the last micro-batch, nor of tokens that predict nothing."""
    programs = programs_of(a_run(), tiny.DEEPSEEK)
    params = programs.task.model.init(programs.task.model.Config.from_hf(tiny.DEEPSEEK), seed=0)
    tokens_NT = np.random.default_rng(0).integers(tiny.VOCABULARY, size=(3, 16), dtype=np.int32)
    gradient = jax.jit(programs.steps.gradient)
    _, grads = gradient(params, micro_batches(tokens_NT, 6, 2), np.int32(3))
    load = grads["layers"]["mlp"]["router"]["correction"]
    np.testing.assert_array_equal(load.sum(axis=-1), 3 * 15 * 2)
    one_by_one = 0
    for tokens_T in tokens_NT:
        _, one = gradient(params, micro_batches(tokens_T[None], 6, 2), np.int32(1))
        one_by_one += one["layers"]["mlp"]["router"]["correction"]
    np.testing.assert_array_equal(load, one_by_one)


def test_a_model_without_a_correction_is_refused():
    with refused("[peers] balance_speed", 0.01, 0):
        programs_of(a_run(), tiny.MODEL)
    with refused("balance_speed"):
        programs_of(a_run(), tiny.DEEPSEEK | {"first_k_dense_replace": 2})
