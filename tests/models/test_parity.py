"""Every model against PyTorch's: values, gradients, files and text. A new one is a line in CASES.

A case is a model_type with the keys in which its config differs from reference.BASE.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from lockstep.programs.loss import cross_entropy
from pipeline.language_model.sampling import EVERY_TOKEN, keep_likeliest
from pipeline.language_model.text_writer import TextWriter
from pipeline.weights import exported, hf
from tests.models.reference import GROUPS, LATENT, SCALED, TOKENS, YARN, drawn

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOW = {"sliding_window": 5, "use_sliding_window": True}
V3 = LATENT | GROUPS | {"num_nextn_predict_layers": 0}
CASES = {
    "llama, one kv head per query head": ("llama", {"num_key_value_heads": 4}),
    "llama, grouped queries": ("llama", {}),
    "llama, one kv head, explicit head_dim": ("llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama, tied embeddings": ("llama", {"tie_word_embeddings": True, "eos_token_id": [2, 3]}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama, dynamic rope, stretched": (
        "llama",
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16},
    ),
    "llama, llama3 rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_scaling": YARN}),
    "llama, yarn rope with every key": (
        "llama",
        {
            "rope_scaling": YARN
            | {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.2}
            | {"truncate": False}
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 5}),
    "qwen2, tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window in the second layer": ("qwen2", WINDOW | {"max_window_layers": 1}),
    "qwen3": (  # whose heads do not divide its width
        "qwen3",
        {"hidden_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "qwen3, biases, window in all layers": (
        "qwen3", WINDOW | {"max_window_layers": 0, "attention_bias": True}),
    "deepseek_v2, no query rank": ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "deepseek_v2, groups, yarn": (
        "deepseek_v2", LATENT | GROUPS | SCALED | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2, biases, all experts, all chosen": (
        "deepseek_v2",
        LATENT
        | {"attention_bias": True, "mlp_bias": True}
        | {"first_k_dense_replace": 0, "num_experts_per_tok": 8},
    ),
    "deepseek_v3": ("deepseek_v3", V3),
    "deepseek_v3, biases, yarn": ("deepseek_v3", V3 | SCALED | {"attention_bias": True}),
    "deepseek_v3, halves turned, weights as they are": (
        "deepseek_v3", V3 | {"rope_interleave": False, "norm_topk_prob": False}),
    "deepseek_v3, all dense": ("deepseek_v3", V3 | {"first_k_dense_replace": 5}),
    "deepseek_v3, all experts, tied embeddings, no query rank": (
        "deepseek_v3",
        V3 | {"first_k_dense_replace": 0, "tie_word_embeddings": True, "q_lora_rank": None}),
}  # fmt: skip
# A rope's frequencies are numbers to a gradient: values after each layer tell one from another. For
# the other cases the gradients tell all that those values do.
GRADIENTS = [
    pytest.param(
        case,
        id=name,
        marks=[pytest.mark.soak] if name.startswith("llama") and "rope" in name else [],
    )
    for name, case in CASES.items()
]
LAYERS = [
    pytest.param(case, id=param.id, marks=[] if param.marks else [pytest.mark.soak])
    for case, param in zip(CASES.values(), GRADIENTS, strict=True)
]
FIRST = {name.partition(",")[0]: case for name, case in reversed(CASES.items())}
PROMPT, SHORT = [5, 90, 17, 3, 64, 22, 8, 41], [33, 2, 71]


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def pair(request, tmp_path_factory):
    """PyTorch's model, the folder it was saved in, and ours as read from there."""
    reference = drawn(*request.param)
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    hf_config, params = hf.read_folder(folder)
    return reference, folder, hf_config, params


@pytest.mark.long
@pytest.mark.parametrize("pair", LAYERS, indirect=True)
def test_every_layer_gives_what_pytorchs_gives(pair):
    """After each layer: what the last norm and the head make of it there."""
    reference, _, hf_config, params = pair
    with torch.no_grad():
        answer = reference(torch.from_numpy(TOKENS).long(), output_hidden_states=True)
    model, config = hf.model_of(hf_config, "a test")
    for count in range(1, config.num_hidden_layers + 1):
        with torch.no_grad():
            after = reference.model.norm(answer.hidden_states[count])
            expected = reference.lm_head(after)
        if count == config.num_hidden_layers:  # transformers gives these normalised
            expected = answer.logits
        layers = first_layers(model, config, params, count)
        found = model.apply(*layers, TOKENS, scan=False, dtype=jnp.float32)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4, rtol=0)


def first_layers(model, config, params, count):
    """The config and the params of a model that ends after some layers."""
    shorter = config.shortened(count)
    shapes = jax.eval_shape(lambda: model.init(shorter, 0))
    groups = {group: params[group] for group in shapes}
    return shorter, jax.tree.map(lambda s, p: p[: len(s)], shapes, groups)


@pytest.mark.long
@pytest.mark.parametrize("pair", GRADIENTS, indirect=True)
def test_the_loss_and_every_gradient_are_those_of_pytorch(pair, tmp_path):
    reference, _, hf_config, params = pair
    tokens = torch.from_numpy(TOKENS).long()
    reference.zero_grad()
    answer = reference(tokens, labels=tokens)
    answer.loss.backward()
    weights = [weight.detach().clone() for weight in reference.parameters()]
    with torch.no_grad():  # gradients in the place of weights: the same files, the same name map
        for weight in reference.parameters():
            weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        reference.save_pretrained(tmp_path)
        for weight, saved in zip(reference.parameters(), weights, strict=True):
            weight.copy_(saved)
    _, expected = hf.read_folder(tmp_path)

    model, config = hf.model_of(hf_config, "a test")

    def loss(params):  # layers scanned here, and unrolled where logits are compared
        x_ND = model.features(config, params, TOKENS, scan=True, dtype=jnp.float32)
        return cross_entropy(x_ND, model.head(config, params), TOKENS).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, answer.loss.item(), rtol=1e-5)
    found, expected_grads = flatten_dict(grads, sep="/"), flatten_dict(expected, sep="/")
    assert found.keys() == expected_grads.keys()
    for path in found.keys() & set(model.balance):  # a buffer there, a load here
        predictions = TOKENS[:, 1:].size
        choices = predictions * config.num_experts_per_tok
        np.testing.assert_array_equal(found.pop(path).sum(axis=-1), choices)
        expected_grads.pop(path)
    for path, grad in expected_grads.items():
        off = np.abs(np.asarray(found[path]) - grad).max()
        assert off <= 1e-3 * np.abs(grad).max(), f"{path}: {off}"


def test_an_export_has_every_tensor_byte_for_byte_and_the_same_config(pair, tmp_path):
    reference, folder, hf_config, params = pair
    hf.write_folder(tmp_path, hf_config, params, "float32")
    found, expected = (load_file(at / hf.WEIGHTS) for at in (tmp_path, folder))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_array_equal(found[name], tensor)
    again = AutoConfig.from_pretrained(tmp_path)
    differs = {
        key: (value, getattr(again, key, None))
        for key, value in reference.config.to_dict().items()
        if getattr(again, key, None) != value
        and key not in ("_name_or_path", "dtype", "rope_parameters")
    }
    assert not differs
    ours, theirs = again.rope_parameters, reference.config.rope_parameters
    assert {k: v for k, v in theirs.items() if v is not None}.items() <= ours.items()


@pytest.mark.parametrize("pair", FIRST.values(), ids=FIRST.keys(), indirect=True)
def test_32_greedy_tokens_of_each_prompt_are_the_same(pair, tmp_path):
    """Written by PyTorch from the files that we export; once for each model_type."""
    _, _, hf_config, params = pair
    hf.write_folder(tmp_path, hf_config, params, "float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    padding = [0] * (len(PROMPT) - len(SHORT))
    answer = theirs.generate(
        torch.tensor([PROMPT, padding + SHORT]),
        attention_mask=torch.tensor([[1] * len(PROMPT), padding + [1] * len(SHORT)]),
        max_new_tokens=32,
        do_sample=False,
        pad_token_id=0,
    )
    ours = exported.read(tmp_path)
    writer = TextWriter(ours, ours.params_to_write, context=ours.context, ends=ours.ends)
    found = writer.write([PROMPT, SHORT], max_new_tokens=32)
    assert found == answer[:, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(None, 0.7), (9, 1.0), (20, 0.5), (1, 1e-9)])
def test_the_tokens_that_stay_are_those_of_transformers(top_k, top_p):
    logits_BV = np.random.default_rng(0).normal(0, 3, (32, 50)).astype(np.float32)
    expected = torch.from_numpy(logits_BV)
    for warper in (TopKLogitsWarper(top_k or 50), TopPLogitsWarper(top_p)):
        expected = warper(None, expected)
    found = keep_likeliest(logits_BV, EVERY_TOKEN if top_k is None else top_k, top_p)
    np.testing.assert_array_equal(found, expected.numpy())


def test_what_we_write_we_read_as_the_same_model(pair):
    _, _, hf_config, _ = pair
    model, config = hf.model_of(hf_config, "a test")
    written = json.loads(json.dumps(config.to_hf("bfloat16")))
    assert model.Config.from_hf(written) == config
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    newer = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    assert model.Config.from_hf(older) == model.Config.from_hf(newer) == config
