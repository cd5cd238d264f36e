"""DeepSeek: its router, its experts and its config; test_parity.py has it beside PyTorch's."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import models
from models import experts
from models.deepseek_v3 import EXPERT_KEYS, deepseek_v3
from pipeline.weights import hf

torch.set_num_threads(1)

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,  # so that a norm which should have 1e-6 shows
    "rope_theta": 500.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
V2 = BASE | {"model_type": "deepseek_v2", "topk_method": "greedy"}
V3 = BASE | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2}
LIMITED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
YARN = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    }
}
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 37)).astype(np.int32)
CONFIG = deepseek_v3.Config.from_hf(V3)
CORRECTION = "e_score_correction_bias"


def pytorch_model(settings: dict, seed: int = 0) -> torch.nn.Module:
    """Random weights, norms that are not one and corrections and biases that are not zero, so that
    no swap of tensors goes unseen."""
    settings = dict(settings)
    hf_config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = list(model.named_parameters())
    tensors += [(name, t) for name, t in model.named_buffers() if name.endswith(CORRECTION)]
    with torch.no_grad():
        for name, tensor in tensors:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0, 0.1, generator=generator)
    return model


def bytes_of(folder) -> dict[str, tuple]:
    return {
        name: (tensor.dtype, tensor.shape, tensor.tobytes())
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def loss(model, config, params, *, dtype=jnp.float32, **how):
    logits_BTV = model.apply(config, params, TOKENS, dtype=dtype, **how)
    chosen = jax.nn.log_softmax(logits_BTV[:, :-1])
    return -jnp.take_along_axis(chosen, TOKENS[:, 1:, None], -1).mean(), logits_BTV


def value_and_grads(model, config, params, *, scan):
    program = jax.value_and_grad(lambda p: loss(model, config, p, scan=scan), has_aux=True)
    (value, logits_BTV), grads = jax.jit(program)(params)
    return logits_BTV, value, flatten_dict(grads, sep="/")


def assert_close(found, expected, tolerance):
    """Every leaf within `tolerance` of the largest value in the leaf."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        error, largest = np.abs(np.asarray(found[path]) - value).max(), np.abs(value).max()
        assert error <= tolerance * largest, f"{path}: {error / largest}"


# ---- Every setting counts ----


def test_every_setting_changes_what_is_computed(tmp_path):
    """One that changed nothing would not be tested by a case of test_parity.py."""
    reference = pytorch_model(V3 | YARN)
    reference.save_pretrained(tmp_path)
    hf_config, params = hf.read_folder(tmp_path)
    config = deepseek_v3.Config.from_hf(hf_config)
    expected = loss(deepseek_v3, config, params, scan=True)[1]
    rope = dataclasses.replace(config.rope, mscale_all_dim=None, mscale=None)
    for changes in (
        {"rope": dataclasses.replace(config.rope, mscale=1.2)},
        {"rope": rope},
        {"rope_interleave": False},
        {"norm_topk_prob": False},
        {"topk_group": 3},
        {"n_group": 2},
        {"num_experts_per_tok": 2},
        {"routed_scaling_factor": 1.0},
        {"rms_norm_eps": 1e-6},
    ):
        found = loss(deepseek_v3, dataclasses.replace(config, **changes), params, scan=True)[1]
        assert np.abs(found - expected).max() > 1e-3, changes


def test_bfloat16_computes_near_float32_and_keeps_the_params_gradients_float32(tmp_path):
    pytorch_model(V3).save_pretrained(tmp_path)
    _, params = hf.read_folder(tmp_path)
    found, expected = (
        jax.jit(partial(loss, deepseek_v3, CONFIG, scan=True, dtype=d))(params)[1]
        for d in (jnp.bfloat16, jnp.float32)
    )
    assert found.dtype == jnp.float32
    # a token whose score is near another may get another expert, and most do not
    assert 1e-5 < np.median(np.abs(found - expected)) < 0.02
    grads = jax.eval_shape(
        jax.grad(lambda p: loss(deepseek_v3, CONFIG, p, scan=True, dtype=jnp.bfloat16)[0]), params
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_a_bfloat16_folder_keeps_the_correction_in_float32_as_transformers_does(tmp_path):
    whole, half, ours = (tmp_path / name for name in ("whole", "half", "ours"))
    pytorch_model(V3).save_pretrained(whole)
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(half)
    stored = {name: dtype for name, (dtype, _, _) in bytes_of(half).items()}
    assert {stored[name] for name in stored if CORRECTION in name} == {np.dtype("float32")}
    hf_config, params = hf.read_folder(half)
    assert hf_config["dtype"] == "bfloat16"
    ours.mkdir()
    hf.write_folder(ours, hf_config, params, "bfloat16", max_shard_bytes=20000)
    assert len(list(ours.glob("*.safetensors"))) > 3
    assert bytes_of(ours) == bytes_of(half)


# ---- The router ----


def router(correction, kernel=None, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    made = experts.Router(config, rngs=nnx.Rngs(0))
    made.correction[...] = jnp.asarray(correction, jnp.float32)
    made.kernel[...] = jnp.zeros_like(made.kernel[...]) if kernel is None else kernel
    return made


def test_equal_scores_choose_the_first_groups_and_experts():
    x_ND = jnp.ones((3, 32))
    _, experts_NA = router(np.zeros(8))(x_ND)
    np.testing.assert_array_equal(experts_NA, [[0, 1, 2]] * 3)
    _, experts_NA = router([0, 0, 0, 0, 1, 1, 1, 1])(x_ND)
    np.testing.assert_array_equal(experts_NA, [[4, 5, 6]] * 3)


def test_the_correction_chooses_in_float32_and_is_no_part_of_the_weights():
    correction = [0, 0, 1, 1 + 2**-12, 0, 0, 0, 0]
    chosen = router(correction, num_experts_per_tok=1, norm_topk_prob=False)
    weights_NA, experts_NA = chosen(jnp.ones((2, 32), jnp.bfloat16))
    np.testing.assert_array_equal(experts_NA, [[3], [3]])  # rounded to bfloat16: 2, the first
    np.testing.assert_allclose(weights_NA, 0.5 * 1.7, rtol=1e-6)
    assert weights_NA.dtype == jnp.float32


def test_a_router_scores_in_float32():
    """Two experts whose scores bfloat16 cannot tell apart."""
    kernel = np.zeros((32, 8), np.float32)
    kernel[0, 5:7] = 1, 1 + 2**-12
    chosen = router(np.zeros(8), kernel, num_experts_per_tok=1, n_group=1, topk_group=1)
    _, experts_NA = chosen(jnp.ones((2, 32), jnp.bfloat16))
    np.testing.assert_array_equal(experts_NA, [[6], [6]])


def test_only_the_best_groups_are_open():
    """The best expert of all stands in a group that is worth less: two of its own count."""
    correction = [9, -9, 2, 2, 1, 1, 0, 0]
    _, experts_NA = router(correction)(jnp.ones((1, 32)))
    np.testing.assert_array_equal(experts_NA, [[2, 3, 4]])


# ---- The experts ----


def experts_one_by_one(x_ND, weights_NA, experts_NA, gate, up, down):
    """Every expert on every token, weighted."""
    total = 0.0
    for e in range(gate.shape[0]):
        share_N = jnp.where(experts_NA == e, weights_NA, 0).sum(axis=1)
        inner = jax.nn.silu(x_ND @ gate[e]) * (x_ND @ up[e])
        total += share_N[:, None] * (inner @ down[e])
    return total


CHOICES = {
    "any": lambda rng, N: np.stack([rng.permutation(8)[:3] for _ in range(N)]),
    "the same for all": lambda rng, N: np.tile([7, 0, 3], (N, 1)),
    "one expert three times": lambda rng, N: np.full((N, 3), 5),
}


@pytest.mark.parametrize("tokens", [1, 2, 7, 90])
@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES.keys())
def test_no_token_is_dropped_however_they_choose(choose, tokens):
    rng = np.random.default_rng(tokens)
    made = experts.Experts(CONFIG, rngs=nnx.Rngs(0))
    graph = nnx.graphdef(made)
    x_ND = jnp.asarray(rng.normal(size=(tokens, 32)), jnp.float32)
    weights_NA = jnp.asarray(rng.uniform(size=(tokens, 3)), jnp.float32)
    experts_NA = jnp.asarray(choose(rng, tokens))
    names = "gate", "up", "down"
    kernels = {name: 10 * getattr(made, name)[...] for name in names}
    out = jnp.asarray(rng.normal(size=(tokens, 32)), jnp.float32)

    def ours(x_ND, weights_NA, kernels):
        return (nnx.merge(graph, kernels)(x_ND, weights_NA, experts_NA) * out).sum()

    def plain(x_ND, weights_NA, kernels):
        return (experts_one_by_one(x_ND, weights_NA, experts_NA, **kernels) * out).sum()

    found, expected = (
        jax.tree.leaves(
            jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(x_ND, weights_NA, kernels)
        )
        for f in (ours, plain)
    )
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max()


def test_the_rows_of_sorted_choices_are_less_than_twice_as_many():
    for count, among in ((1, 8), (8, 8), (9, 8), (111, 8), (1024, 16), (3072, 64), (5, 256)):
        rows, size = experts._sort(jnp.zeros(count, jnp.int32), among)
        assert rows.choice_R.shape[0] == rows.expert_b.shape[0] * size
        assert count <= rows.choice_R.shape[0] < 2 * count or count == 1
        held = np.asarray(rows.choice_R)
        assert sorted(held[held < count]) == list(range(count))
        np.testing.assert_array_equal(held[np.asarray(rows.row_C)], np.arange(count))


# ---- Its own properties ----


def test_no_token_sees_a_later_one():
    """Tokens are sorted by expert across texts, and yet no text shows in another."""
    params = deepseek_v3.init(dataclasses.replace(CONFIG, initializer_range=0.1), 0)
    program = jax.jit(lambda t: deepseek_v3.apply(CONFIG, params, t, scan=True, dtype=jnp.float32))
    before = np.asarray(program(TOKENS))
    for place in (1, 9, 18, 36):
        changed = TOKENS.copy()
        changed[0, place] = (changed[0, place] + 1) % 96
        after = np.asarray(program(changed))
        np.testing.assert_allclose(after[0, :place], before[0, :place], atol=1e-5)
        np.testing.assert_allclose(after[1], before[1], atol=1e-5)
        assert (np.abs(after[0, place:] - before[0, place:]).max(axis=-1) > 1e-4).all()


def test_scanned_and_unrolled_layers_agree():
    params = deepseek_v3.init(dataclasses.replace(CONFIG, initializer_range=0.1), 0)
    _, unrolled, grads = value_and_grads(deepseek_v3, CONFIG, params, scan=False)
    _, scanned, scanned_grads = value_and_grads(deepseek_v3, CONFIG, params, scan=True)
    np.testing.assert_allclose(unrolled, scanned, rtol=1e-6)
    assert_close(scanned_grads, grads, 1e-5)


def test_what_is_not_kept_for_the_backward_pass_is_computed_again():
    config = dataclasses.replace(CONFIG, initializer_range=0.1, num_hidden_layers=2)
    params = deepseek_v3.init(config, 0)
    kept, again = (
        jax.jit(jax.grad(lambda p, r=remat: loss(deepseek_v3, config, p, scan=True, remat=r)[0]))(
            params
        )
        for remat in ("everything_saveable", "nothing_saveable")
    )
    assert_close(flatten_dict(again, sep="/"), flatten_dict(kept, sep="/"), 1e-5)


def test_params_can_be_mapped_over_peers():
    config = dataclasses.replace(CONFIG, initializer_range=0.1, num_hidden_layers=2)
    params = deepseek_v3.init(config, 0)
    peers = [jax.tree.map(lambda leaf, s=s: leaf * s, params) for s in (1.0, 0.5, -1.0)]
    one = jax.value_and_grad(lambda p: loss(deepseek_v3, config, p, scan=True)[0])
    values, grads = jax.jit(jax.vmap(one))(jax.tree.map(lambda *leaves: np.stack(leaves), *peers))
    alone = jax.jit(one)
    for number, peer in enumerate(peers):
        value, grad = alone(peer)
        np.testing.assert_allclose(values[number], value, rtol=1e-5)
        mine = jax.tree.map(lambda leaf, n=number: leaf[n], grads)
        assert_close(flatten_dict(mine, sep="/"), flatten_dict(grad, sep="/"), 1e-4)


@pytest.mark.parametrize("width", [6, 18, 20])
def test_jax_own_attention_gives_the_same_logits(width):
    """With values less or more wide than queries and keys: the call that a GPU's kernel takes."""
    config = dataclasses.replace(CONFIG, initializer_range=0.1, v_head_dim=width)
    params = deepseek_v3.init(config, 0)
    plain, other = (
        deepseek_v3.apply(config, params, TOKENS, scan=True, dtype=jnp.float32, attention=kind)
        for kind in ("matmul", "xla")
    )
    np.testing.assert_allclose(plain, other, atol=1e-4)


def test_fresh_params_are_hugging_faces_draw_and_follow_from_the_seed():
    params = flatten_dict(deepseek_v3.init(CONFIG, 0), sep="/")
    for path, leaf in params.items():
        assert leaf.dtype == jnp.float32
        if "norm" in path:
            assert (leaf == 1).all()
        elif path.endswith("correction"):
            assert (leaf == 0).all()
        else:
            assert 0.9 < np.std(leaf) / 0.02 < 1.1
            assert abs(np.mean(leaf)) < 0.002
    drawn = [path for path in params if "norm" not in path and "correction" not in path]
    same, other = (flatten_dict(deepseek_v3.init(CONFIG, seed), sep="/") for seed in (0, 1))
    assert all((same[path] == params[path]).all() for path in params)
    assert all((other[path] != params[path]).any() for path in drawn)
    gate = params["layers/mlp/experts/gate"]
    assert gate.shape == (2, 8, 32, 24)  # layers, experts, in, out
    assert len({leaf.tobytes() for layer in np.asarray(gate) for leaf in layer}) == 16


# ---- Config ----


@pytest.mark.parametrize("settings", [V2 | LIMITED | YARN, V3 | YARN])
def test_transformers_reads_the_config_that_we_write(settings):
    model, config = hf.model_of(settings, "a test")
    written = json.loads(json.dumps(config.to_hf("bfloat16")))
    kind = written.pop("model_type")
    assert written["head_dim"] == 8
    read = AutoConfig.for_model(kind, **written).to_dict()
    assert model.Config.from_hf(read) == config
    for key, value in settings.items():
        if key not in ("rope_scaling", "rope_theta"):
            assert read[key] == value


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_what_a_config_leaves_out_is_what_transformers_takes(kind):
    short = {
        "vocab_size": 96,
        "hidden_size": 256,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 128,  # V3's default of num_key_value_heads
        "num_experts_per_tok": 3,
    }
    read = AutoConfig.for_model(kind, **short).to_dict()
    assert models.get(kind).Config.from_hf(short) == models.get(kind).Config.from_hf(read)


def test_a_config_without_experts_may_leave_what_it_says_of_them_null():
    for settings in (V2, V3):
        settings = settings | {"first_k_dense_replace": 3}
        said = hf.model_of(settings, "a test")[1]
        null = dict.fromkeys(EXPERT_KEYS)
        config = hf.model_of(settings | null, "a test")[1]
        assert config.dense == said.dense == 3
        written = config.to_hf()
        AutoConfig.for_model(written.pop("model_type"), **written)  # which takes no null
    with pytest.raises(models.ModelError, match="n_routed_experts is None, expected an integer"):
        deepseek_v3.Config.from_hf(V3 | {"n_routed_experts": None})


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (V3, {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        (V3, {"attention_dropout": 0.1}, "attention_dropout is 0.1, but only 0.0"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax', but only 'sigmoid'"),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy', but only 'noaux_tc'"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2, but only 1"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq is 2, but only 1"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob is True, but only False"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', but only 'softmax'"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', expected greedy or group"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok is None, expected an integer"),
        (V2, LIMITED | {"n_group": None}, "n_group is None, expected an integer above 0"),
        (V2, LIMITED | {"topk_group": None}, "topk_group is None, expected an integer above 0"),
        (V2, LIMITED | {"n_group": 3}, "n_routed_experts is 8, expected a multiple of n_group (3)"),
        (V3, {"n_group": 3}, "n_routed_experts is 8, expected a multiple of n_group (3)"),
        (V3, {"n_group": None}, "n_group is None, expected an integer above 0"),
        (V3, {"topk_group": None}, "topk_group is None, expected an integer above 0"),
        (V3, {"n_group": 8}, "n_group is 8, expected at most 4: 2 of the n_routed_experts (8)"),
        (V3, {"topk_group": 5}, "topk_group is 5, expected at most n_group (4)"),
        (V3, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most 4"),
        (V2, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most 8"),
        (V3, {"norm_topk_prob": None}, "norm_topk_prob is None, expected true or false"),
        (V3, {"rope_interleave": None}, "rope_interleave is None, expected true or false"),
        (V3, {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected num_attention_heads"),
        (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, expected an even number"),
        (V3, {"qk_rope_head_dim": None}, "qk_rope_head_dim is None, expected an integer above 0"),
        (V3, {"v_head_dim": None}, "v_head_dim is None, expected an integer above 0"),
        (V3, {"kv_lora_rank": 0}, "kv_lora_rank is 0, expected an integer above 0"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank is 0, expected an integer above 0"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, expected an integer"),
        (V3, {"first_k_dense_replace": True}, "first_k_dense_replace is True, expected an integer"),
        (V3, {"n_shared_experts": 0}, "n_shared_experts is 0, expected an integer above 0"),
        (V3, {"routed_scaling_factor": "2"}, "routed_scaling_factor is '2', expected a number"),
    ],
)
def test_a_config_that_is_not_computed_here_is_refused_by_key_and_value(base, changes, said):
    with pytest.raises(models.ModelError) as caught:
        models.get(base["model_type"]).Config.from_hf(base | changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
