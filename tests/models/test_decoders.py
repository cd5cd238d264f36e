"""Properties of every decoder; test_parity.py has its values beside PyTorch's."""

import dataclasses
from functools import cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import models
from models.decoder import REMAT
from models.deepseek_v3 import deepseek_v3
from models.llama import llama
from pipeline.runfile import Peers
from tests.models.reference import BASE, GROUPS, LATENT, TOKENS, assert_close, loss_of

pytestmark = pytest.mark.long

MODELS = {
    "llama": llama.Config.from_hf(BASE | {"eos_token_id": 2}),
    "deepseek_v3": deepseek_v3.Config.from_hf(BASE | LATENT | GROUPS),
}
OPTIONS = {"scan": True, "remat": REMAT[0], "attention": "matmul", "dtype": jnp.float32}
SCALES = (1.0, 0.5, 2.0, -1.0)
SOAK = pytest.mark.soak
by_model = pytest.mark.parametrize("name", MODELS)
quickly_by_model = pytest.mark.parametrize(
    "name", ["llama", pytest.param("deepseek_v3", marks=SOAK)]
)


@cache
def made(name):
    """The model, its config, and params large enough that attention matters."""
    model, config = models.get(name), MODELS[name]
    return model, config, model.init(dataclasses.replace(config, initializer_range=0.1), 0)


@cache
def compiled_once(name, *options):
    model, config, _ = made(name)
    options = dict(zip(OPTIONS, options, strict=True))
    return jax.jit(jax.value_and_grad(lambda p: loss_of(model, config, p, **options)))


def program(name, **options):
    """A program params -> the loss and its gradient, one for all tests of equal options."""
    return compiled_once(name, *(OPTIONS | options).values())


def gradient(name, **options):
    """The loss and its gradient."""
    return program(name, **options)(made(name)[2])


@cache
def logits(name):
    """A program tokens_BT -> logits_BTV."""
    model, config, params = made(name)
    return jax.jit(lambda t: model.apply(config, params, t, scan=True, dtype=jnp.float32))


@quickly_by_model
def test_scanned_and_unrolled_layers_agree(name):
    (scanned, scanned_grads), (unrolled, grads) = gradient(name), gradient(name, scan=False)
    np.testing.assert_allclose(scanned, unrolled, rtol=1e-6)
    assert_close(scanned_grads, grads, 1e-5)


@by_model
def test_no_token_sees_a_later_one_or_another_row(name):
    """Experts sort the tokens of all rows, and yet no row shows in another."""
    before = np.asarray(logits(name)(TOKENS))
    for position in (1, 9, 10, 18, 36):  # on both sides of the edges of a block of queries
        changed = TOKENS.copy()
        changed[0, position] = (changed[0, position] + 1) % 96
        after = np.asarray(logits(name)(changed))
        exact = name == "llama"  # experts sum the rows of a block in another order
        np.testing.assert_allclose(
            after[0, :position], before[0, :position], rtol=0, atol=0 if exact else 1e-5
        )
        np.testing.assert_allclose(after[1], before[1], rtol=0, atol=0 if exact else 1e-5)
        assert (np.abs(after[0, position:] - before[0, position:]).max(axis=-1) > 1e-4).all()


def test_any_length_gives_the_logits_of_the_longer_text():
    whole = logits("llama")(TOKENS)
    for length in (1, 3, 30):  # in the first two, some quarters are empty
        part = logits("llama")(TOKENS[:, :length])
        np.testing.assert_allclose(part, whole[:, :length], atol=1e-5)


def test_the_gradient_of_unrolled_layers_never_sums_whole_stacks():
    model, config, params = made("llama")
    stacks = {leaf.shape for leaf in jax.tree.leaves(params["layers"])}
    program = jax.make_jaxpr(jax.grad(lambda p: loss_of(model, config, p, scan=False)))(params)
    made_by = [
        equation.primitive.name
        for equation in program.eqns
        for out in equation.outvars
        if out.aval.shape in stacks
    ]
    assert made_by, "nothing of a stack's shape: this test looks in the wrong place"
    assert set(made_by) == {"concatenate"}


@quickly_by_model
def test_params_can_be_mapped_over_peers(name):
    params, alone = made(name)[2], program(name)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf * scale for scale in SCALES]), params)
    values, grads = jax.jit(jax.vmap(alone))(stacked)
    for peer, scale in enumerate(SCALES):
        value, grad = alone(jax.tree.map(lambda leaf, s=scale: leaf * s, params))
        np.testing.assert_allclose(values[peer], value, rtol=1e-5)
        assert_close(jax.tree.map(lambda leaf, n=peer: leaf[n], grads), grad, 1e-4)


# ---- Precision and kernels ----


@by_model
def test_in_bfloat16_the_logits_and_the_params_gradients_are_float32(name):
    found = jax.eval_shape(program(name, dtype=jnp.bfloat16), made(name)[2])
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_jax_own_attention_gives_the_same_gradients(dtype):
    """The call that cuDNN's kernel takes, by the implementation that a CPU has."""
    _, plain = gradient("llama", dtype=dtype)
    _, other = gradient("llama", dtype=dtype, attention="xla")
    assert_close(plain, other, 1e-4 if dtype == jnp.float32 else 0.05)


@pytest.mark.parametrize("width", [6, 18, 20])
def test_jax_own_attention_takes_values_of_another_width_than_keys(width):
    model, config = deepseek_v3, dataclasses.replace(MODELS["deepseek_v3"], v_head_dim=width)
    params = model.init(dataclasses.replace(config, initializer_range=0.1), 0)
    plain, other = (
        model.apply(config, params, TOKENS, scan=True, dtype=jnp.float32, attention=kernel)
        for kernel in ("matmul", "xla")
    )
    np.testing.assert_allclose(plain, other, atol=1e-4)


# ---- Rematerialisation ----


@pytest.mark.parametrize(
    ("name", "remat", "scan"),
    [
        *(("llama", remat, True) for remat in REMAT[1:]),
        *(pytest.param("llama", r, False, marks=pytest.mark.soak) for r in REMAT[1:-1]),
        ("llama", REMAT[-1], False),
        ("deepseek_v3", REMAT[-1], True),
    ],
)
def test_computing_again_gives_the_same_gradients(name, remat, scan):
    _, expected = gradient(name, scan=scan)
    _, found = gradient(name, scan=scan, remat=remat)
    assert_close(found, expected, 1e-5)


def test_a_run_file_accepts_every_policy_and_no_other():
    assert get_args(Peers.model_fields["remat"].annotation) == REMAT


def lowered(layers, **options):
    """The program of the gradient for XLA, at a size where activations outweigh params."""
    config = dataclasses.replace(MODELS["llama"], num_hidden_layers=layers)
    shapes = jax.eval_shape(lambda: llama.init(config, 0))
    tokens_BT = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    options = {"scan": True} | options

    def total(params, tokens_BT):
        return llama.features(config, params, tokens_BT, dtype=jnp.float32, **options).sum()

    return jax.jit(jax.grad(total)).lower(shapes, tokens_BT)


def test_keeping_less_for_the_backward_pass_saves_memory():
    plans = [lowered(8, remat=remat).compile().memory_analysis() for remat in REMAT]
    nbytes = [plan.temp_size_in_bytes for plan in plans]
    assert nbytes == sorted(nbytes, reverse=True)
    assert nbytes[-1] < 0.2 * nbytes[0]


def test_a_deeper_model_is_no_larger_a_program():
    """What compiling takes: 32 layers are the instructions of 4, except for their counts."""
    shallow, deep = (lowered(layers).as_text().count("\n") for layers in (4, 32))
    assert deep <= 1.05 * shallow
    unrolled = lowered(8, scan=False).as_text().count("\n")
    assert unrolled > 1.5 * shallow


# ---- Fresh params ----


@quickly_by_model
def test_fresh_params_are_hugging_faces_draw_and_follow_from_the_seed(name):
    model, config = models.get(name), MODELS[name]
    first, same, other = (flatten_dict(model.init(config, seed), sep="/") for seed in (0, 0, 1))
    for path, leaf in first.items():
        assert leaf.dtype == jnp.float32
        np.testing.assert_array_equal(same[path], leaf)
        if "norm" in path:
            assert (leaf == 1).all()
        elif path.endswith("correction"):
            assert (leaf == 0).all()
        else:
            assert 0.9 < np.std(leaf) / 0.02 < 1.1
            assert abs(np.mean(leaf)) < 0.002
            assert (other[path] != leaf).any()
        if "layers/" in path and path.endswith("kernel") and len(leaf) > 1:
            assert (leaf[0] != leaf[1]).any()


def test_every_expert_draws_its_own_params():
    gate = made("deepseek_v3")[2]["layers"]["mlp"]["experts"]["gate"]
    assert gate.shape == (2, 8, 32, 24)  # layers, experts, in, out
    assert len({leaf.tobytes() for layer in np.asarray(gate) for leaf in layer}) == 16


def test_fresh_params_are_the_pinned_ones():
    """A change here changes every run that begins from `Init`."""
    changes = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 8}
    changes |= {"num_key_value_heads": 8}
    params = llama.init(llama.Config.from_hf(BASE | changes), 0)
    pinned = [params["embed"]["embedding"][0, 0], params["layers"]["mlp"]["up"]["kernel"][1, 0, 0]]
    np.testing.assert_allclose(pinned, [0.0200803, 0.0266983], rtol=1e-5)
