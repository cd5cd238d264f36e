"""models/llama.py: its own properties and its config; test_parity.py has it beside PyTorch's."""

import dataclasses
import json
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, PartitionSpec
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

import models
from models.decoder import REMAT
from models.llama import llama
from models.parts import RMSNorm
from models.rope import Rope, scaled_frequencies
from pipeline.runfile import Peers

torch.set_num_threads(1)

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}
CONFIG = llama.Config.from_hf(BASE)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 37))  # 37: no quarter is like another
SCALES = (1.0, 0.5, 2.0, -1.0)


def pytorch_model(config: llama.Config) -> LlamaForCausalLM:
    """Random weights and norms that are not one, so that no swap of tensors goes unseen."""
    model = LlamaForCausalLM(LlamaConfig(**config.to_hf()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(0, 0.1, generator=generator)
    return model


def as_params(config: llama.Config, tensors: dict[str, torch.Tensor]) -> dict:
    """PyTorch's tensors in our layout."""
    params = {}
    for path in flatten_dict(jax.eval_shape(lambda: llama.init(config, 0)), sep="/"):
        name, transposed = llama.names[path]
        layers = range(config.num_hidden_layers) if "{layer}" in name else [None]
        found = [tensors[name.format(layer=layer)].detach().numpy() for layer in layers]
        found = [tensor.T if transposed else tensor for tensor in found]
        params[path] = np.stack(found) if "{layer}" in name else found[0]
    return unflatten_dict(params, sep="/")


def loss(config, params, tokens_BT, *, scan):
    logits_BTV = llama.apply(config, params, tokens_BT, scan=scan, dtype=jnp.float32)
    chosen = jax.nn.log_softmax(logits_BTV[:, :-1])
    return -jnp.take_along_axis(chosen, tokens_BT[:, 1:, None], -1).mean(), logits_BTV


def value_and_grads(config, params, *, scan):
    program = jax.value_and_grad(lambda p: loss(config, p, TOKENS, scan=scan), has_aux=True)
    return jax.jit(program)(params)


def assert_close(found, expected, tolerance):
    """Every leaf within `tolerance` of the largest value in the leaf."""
    found, expected = flatten_dict(found, sep="/"), flatten_dict(expected, sep="/")
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        error = np.abs(np.asarray(found[path]) - value).max() / np.abs(value).max()
        assert error < tolerance, f"{path}: {error}"


# ---- Where PyTorch rounds ----


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 4096},
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_frequencies_have_the_bits_of_pytorch(rope_type):
    for head_dim, theta in ((16, 500.0), (32, 1e4), (64, 1e4), (128, 5e5)):
        rope = {"rope_type": rope_type, "rope_theta": theta} | ROPES[rope_type]
        changes = {"head_dim": head_dim, "rope_parameters": rope, "max_position_embeddings": 65536}
        base = {key: value for key, value in BASE.items() if key != "rope_theta"}
        reference = LlamaRotaryEmbedding(LlamaConfig(**base | changes))
        read = Rope.from_hf({"rope_theta": None} | changes)
        found, scale = scaled_frequencies(read, head_dim, 100, 65536)
        assert scale == pytest.approx(reference.attention_scaling, rel=1e-12)
        expected = reference.inv_freq.numpy()
        if rope_type in ("default", "linear", "dynamic"):
            np.testing.assert_array_equal(found, expected)
        else:  # sums of products, which PyTorch may fuse
            np.testing.assert_allclose(found, expected, rtol=3e-7)


def test_a_norm_in_bfloat16_rounds_where_pytorch_rounds():
    rng = np.random.default_rng(0)
    x, scale = rng.normal(size=(64, 64)), rng.uniform(0.5, 1.5, 64)
    reference = LlamaRMSNorm(64, eps=1e-5).to(torch.bfloat16)
    with torch.no_grad():
        reference.weight.copy_(torch.from_numpy(scale))
        expected = reference(torch.from_numpy(x).to(torch.bfloat16)).float().numpy()
    norm = RMSNorm(64, eps=1e-5)
    norm.scale[...] = jnp.asarray(scale, jnp.float32)
    found = np.asarray(norm(jnp.asarray(x, jnp.bfloat16)), np.float32)
    assert (found == expected).mean() > 0.999  # scaling before rounding: 0.7


def test_bfloat16_computes_near_float32_and_keeps_the_params_gradients_float32():
    params = as_params(CONFIG, dict(pytorch_model(CONFIG).named_parameters()))
    apply = partial(llama.apply, CONFIG, tokens_BT=TOKENS, scan=True)
    found, expected = (jax.jit(partial(apply, dtype=d))(params) for d in ("bfloat16", "float32"))
    assert found.dtype == jnp.float32
    assert 1e-4 < np.abs(found - expected).max() < 0.1
    grads = jax.eval_shape(jax.grad(lambda p: apply(p, dtype="bfloat16").sum()), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


# ---- Its own properties ----


def test_scanned_and_unrolled_layers_agree():
    params = llama.init(CONFIG, 0)
    (unrolled, _), grads = value_and_grads(CONFIG, params, scan=False)
    (scanned, _), scanned_grads = value_and_grads(CONFIG, params, scan=True)
    np.testing.assert_allclose(unrolled, scanned, rtol=1e-6)
    assert_close(scanned_grads, grads, 1e-6)


def test_no_token_sees_a_later_one():
    params = llama.init(CONFIG, 0)
    program = jax.jit(lambda t: llama.apply(CONFIG, params, t, scan=True, dtype=jnp.float32))
    before = np.asarray(program(TOKENS))
    for place in (1, 9, 10, 18, 36):  # on both sides of the edges of a block of queries
        changed = TOKENS.copy()
        changed[:, place] = (changed[:, place] + 1) % 96
        after = np.asarray(program(changed))
        np.testing.assert_array_equal(after[:, :place], before[:, :place])
        assert (after[:, place:] != before[:, place:]).any(axis=(0, 2)).all()


def test_any_length_gives_the_logits_of_the_longer_text():
    params = llama.init(CONFIG, 0)
    program = jax.jit(lambda t: llama.apply(CONFIG, params, t, scan=True, dtype=jnp.float32))
    whole = program(TOKENS)
    for length in (1, 3, 30):  # of the first two, some quarters are empty
        part = program(TOKENS[:, :length])
        np.testing.assert_allclose(part, whole[:, :length], atol=1e-6)


def test_the_gradient_of_unrolled_layers_never_sums_whole_stacks():
    params = llama.init(CONFIG, 0)
    stacks = {leaf.shape for leaf in jax.tree.leaves(params["layers"])}
    program = jax.make_jaxpr(jax.grad(lambda p: loss(CONFIG, p, TOKENS, scan=False)[0]))(params)
    made = [
        (equation.primitive.name, out.aval.shape)
        for equation in program.eqns
        for out in equation.outvars
        if out.aval.shape in stacks
    ]
    assert made, "nothing of a stack's shape: this test looks in the wrong place"
    assert {name for name, _ in made} == {"concatenate"}


@pytest.mark.release
def test_params_can_be_mapped_over_peers_and_devices():
    one = jax.jit(lambda p: llama.apply(CONFIG, p, TOKENS, scan=True, dtype=jnp.float32))
    params = llama.init(CONFIG, 0)
    stacked = jax.tree.map(lambda leaf: np.stack([leaf * scale for scale in SCALES]), params)
    expected = [one(jax.tree.map(lambda leaf, n=n: leaf[n], stacked)) for n in range(4)]
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(stacked), expected, atol=1e-6)
    mesh = jax.make_mesh((4,), ("peer",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("peer")
    sharded = jax.shard_map(
        lambda p: one(jax.tree.map(lambda leaf: leaf[0], p))[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    np.testing.assert_allclose(jax.jit(sharded)(stacked), expected, atol=1e-6)


# ---- Fresh params ----


def test_fresh_params_are_hugging_faces_draw_and_follow_from_the_seed():
    params = flatten_dict(llama.init(CONFIG, 0), sep="/")
    optional = [path for path in llama.names if path.endswith(("bias", "y_norm/scale"))]
    assert params.keys() == llama.names.keys() - set(optional)
    for path, leaf in params.items():
        assert leaf.dtype == jnp.float32
        if "norm" in path:
            assert (leaf == 1).all()
        else:
            assert 0.95 < np.std(leaf) / 0.02 < 1.05
            assert abs(np.mean(leaf)) < 0.001
    same, other = (flatten_dict(llama.init(CONFIG, seed), sep="/") for seed in (0, 1))
    assert all((same[path] == params[path]).all() for path in params)
    drawn = [path for path in params if "norm" not in path]
    assert all((other[path] != params[path]).any() for path in drawn)
    in_layers = [path for path in drawn if path.startswith("layers/")]
    assert all((params[path][0] != params[path][1]).any() for path in in_layers)


def test_fresh_params_are_the_pinned_ones():
    """A change here changes every run that begins from `Init`."""
    params = llama.init(CONFIG, 0)
    found = [params["embed"]["embedding"][0, 0], params["layers"]["mlp"]["up"]["kernel"][1, 0, 0]]
    np.testing.assert_allclose(found, [0.0200803, 0.0266983], rtol=1e-5)


# ---- Config ----


def test_transformers_reads_the_config_that_we_write():
    config = dataclasses.replace(CONFIG, rope=Rope(5e5), eos_token_id=(2, 3))
    read = LlamaConfig(**json.loads(json.dumps(config.to_hf("bfloat16"))))
    assert read.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert read.dtype in ("bfloat16", torch.bfloat16)
    assert read.eos_token_id == [2, 3]
    assert llama.Config.from_hf(read.to_dict()) == config


def test_both_spellings_of_rope_are_read():
    base = {key: value for key, value in BASE.items() if key != "rope_theta"}
    version_4 = base | {"rope_theta": 5e5, "rope_scaling": None}
    version_5 = base | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert llama.Config.from_hf(version_4) == llama.Config.from_hf(version_5)
    assert llama.Config.from_hf(version_4).rope == Rope(5e5)
    assert llama.Config.from_hf(base).rope == Rope(1e4)


def test_what_a_config_leaves_out_is_what_transformers_takes():
    short = {key: BASE[key] for key in list(BASE)[:5]}
    assert llama.Config.from_hf(short) == llama.Config.from_hf(LlamaConfig(**short).to_dict())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({"mlp_bias": 1}, "mlp_bias is 1, expected true or false"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, but only 0.0"),
        ({"quantization_config": {}}, "quantization_config is {}, but only None"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_scaling.rope_type is 'longrope', expected one of: default, linear, dynamic, ",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor is missing, expected for rope_type 'linear'",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2}},
            "rope_parameters.factor is -2, expected a number above 0",
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}},
            "rope_parameters.beta_fast is not known for rope_type 'linear'",
        ),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', expected a table"),
        ({"hidden_size": "64"}, "hidden_size is '64', expected an integer above 0"),
        ({"hidden_size": 60}, "hidden_size is 60, expected a multiple of num_attention_heads (8)"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id is (1, '</s>'), expected a token id"),
    ],
)
def test_a_config_that_is_not_computed_here_is_refused_by_key_and_value(changes, said):
    with pytest.raises(models.ModelError) as caught:
        llama.Config.from_hf(BASE | changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named():
    for key in list(BASE)[:5]:
        with pytest.raises(models.ModelError, match=f"{key} is missing"):
            llama.Config.from_hf({k: v for k, v in BASE.items() if k != key})


@pytest.mark.parametrize("model_type", ["gpt2", None, ["llama"]])
def test_an_unknown_model_type_is_refused_with_those_that_are_known(model_type):
    with pytest.raises(models.ModelError, match="expected one of: deepseek_v2, deepseek_v3, llama"):
        models.get(model_type)
    assert models.get("llama") is llama


# ---- Attention by other means ----


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_jax_own_attention_gives_the_same_logits_and_gradients(dtype):
    """The call that cuDNN's kernel takes, by the implementation that a CPU has."""
    params = llama.init(CONFIG, seed=0)

    def total(params, attention):
        logits = llama.apply(CONFIG, params, TOKENS, scan=False, dtype=dtype, attention=attention)
        return (logits**2).sum()

    plain, other = (
        jax.jit(jax.grad(partial(total, attention=a)))(params) for a in ("matmul", "xla")
    )
    assert_close(plain, other, 1e-4 if dtype == jnp.float32 else 0.05)


# ---- Depth ----


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("remat", REMAT)
def test_computing_again_gives_the_same_gradients(remat, scan):
    params = llama.init(CONFIG, 0)

    def total(params, remat):
        how = {"scan": scan, "dtype": jnp.float32, "remat": remat}
        return (llama.apply(CONFIG, params, TOKENS, **how) ** 2).sum()

    expected, found = (
        jax.jit(jax.grad(partial(total, remat=r)))(params) for r in ("everything_saveable", remat)
    )
    assert_close(found, jax.tree.map(np.asarray, expected), 1e-5)


def test_a_run_file_can_ask_for_every_way_and_no_other():
    assert get_args(Peers.model_fields["remat"].annotation) == REMAT


def compiled(layers, **how):
    """The gradient's program, at a size where activations outweigh params."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers)
    shapes = jax.eval_shape(lambda: llama.init(config, 0))
    tokens_BT = jax.ShapeDtypeStruct((8, 256), jnp.int32)

    def total(params, tokens_BT):
        how.setdefault("scan", True)
        return llama.features(config, params, tokens_BT, dtype=jnp.float32, **how).sum()

    return jax.jit(jax.grad(total)).lower(shapes, tokens_BT).compile()


def test_less_is_kept_the_more_is_computed_again():
    kept = [compiled(8, remat=remat).memory_analysis().temp_size_in_bytes for remat in REMAT]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < 0.2 * kept[0]


def test_a_deeper_model_is_no_larger_a_program():
    """What compiling takes: 32 layers are the instructions of 4, but for their counts."""
    shallow, deep = (compiled(layers).as_text().count("\n") for layers in (4, 32))
    assert deep <= 1.05 * shallow
    unrolled = compiled(8, scan=False).as_text().count("\n")
    assert unrolled > 1.5 * shallow
