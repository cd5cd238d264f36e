"""The configs of all models: read, written and refused as transformers would have them."""

import json
import random
from dataclasses import fields

import pytest
from transformers import AutoConfig

import models
from models.deepseek_v3 import EXPERT_KEYS
from models.llama import llama
from models.rope import TYPES, Rope
from tests.errors import refused
from tests.models.reference import BASE, GROUPS, LATENT, SCALED, YARN

LLAMA = BASE | {"model_type": "llama"}
MISTRAL = BASE | {"model_type": "mistral"}
QWEN2 = BASE | {"model_type": "qwen2", "num_hidden_layers": 3}
V2 = BASE | LATENT | {"model_type": "deepseek_v2", "topk_method": "greedy"}
V3 = BASE | LATENT | GROUPS | {"model_type": "deepseek_v3"}
ON = {"use_sliding_window": True, "sliding_window": 4}
BY_2 = {"rope_type": "linear", "factor": 2.0}
LIMITED = GROUPS | {"topk_method": "group_limited_greedy"}
SHORT = {
    "vocab_size": 96,
    "hidden_size": 256,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 128,  # V3's default of num_key_value_heads
}
LEFT_OUT = dict.fromkeys(models.MODELS, SHORT)
LEFT_OUT |= {name: SHORT | {"num_experts_per_tok": 3} for name in ("deepseek_v2", "deepseek_v3")}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_key_that_a_config_leaves_out_has_the_default_of_transformers(name):
    read = AutoConfig.for_model(name, **LEFT_OUT[name]).to_dict()
    assert models.get(name).Config.from_hf(LEFT_OUT[name]) == models.get(name).Config.from_hf(read)


def test_keys_about_experts_may_be_null_where_no_layer_has_any():
    for settings in (V2, V3):
        settings = settings | {"first_k_dense_replace": 3}
        Config = models.get(settings["model_type"]).Config
        config = Config.from_hf(settings | dict.fromkeys(EXPERT_KEYS))
        assert config.dense == Config.from_hf(settings).dense == 3
        written = config.to_hf()
        AutoConfig.for_model(written.pop("model_type"), **written)  # which accepts no null
    with refused("n_routed_experts", "None", error=models.ModelError):
        models.get("deepseek_v3").Config.from_hf(V3 | {"n_routed_experts": None})


def test_a_padding_token_of_minus_one_is_none():
    """As in the first published Llamas."""
    config = models.get("llama").Config.from_hf(LLAMA | {"pad_token_id": -1})
    assert config.pad_token_id is None


def test_what_older_versions_of_transformers_compute_otherwise_is_said():
    scaled, plain = SCALED, {"rope_scaling": YARN}
    for settings, said in ((V2 | scaled, True), (V2 | plain, False), (V3 | scaled, False)):
        config = models.get(settings["model_type"]).Config.from_hf(settings)
        assert ("4.57 and 5.0" in (config.caveat or "")) == said


YARN_OF_5 = {"rope_parameters": YARN | {"rope_theta": 500.0}}


@pytest.mark.parametrize(
    "same",
    [
        {"rope_scaling": YARN},
        {"rope_scaling": YARN | {"type": "yarn"}, "original_max_position_embeddings": 16},
        {"rope_scaling": YARN} | YARN_OF_5,
        {"rope_scaling": None} | YARN_OF_5,
        {"rope_scaling": {}, "rope_theta": None} | YARN_OF_5,
    ],
)
def test_spellings_of_rope_may_stand_side_by_side(same):
    assert llama.Config.from_hf(BASE | same).rope == Rope(500.0, **YARN)


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (BASE | YARN_OF_5, {"rope_scaling": YARN | {"factor": 2.0}}, "'factor': 2.0"),
        (BASE | YARN_OF_5, {"rope_scaling": {"type": "default"}}, "and rope_scaling is {'type'"),
        # the folder that version 5 or an export writes, and what a model card says to add
        (llama.Config.from_hf(BASE).to_hf(), {"rope_scaling": YARN}, "rope_parameters is {'rope_"),
        ({**BASE, "rope_theta": None} | YARN_OF_5, {"rope_scaling": YARN}, "'rope_theta': 500.0"),
        (BASE | YARN_OF_5, {"rope_theta": 1e4}, "rope_theta is 10000.0 and rope_parameters.rope_"),
        (BASE, {"rope_scaling": YARN | {"rope_theta": 1.0}}, "rope_theta is 500.0"),
        (BASE, {"rope_scaling": YARN | {"type": "linear"}}, "type is 'linear' and rope_scaling"),
        (
            BASE | YARN_OF_5,
            {"original_max_position_embeddings": 64},
            "original_max_position_embeddings is 64",
        ),
        (V2, {"num_experts": 4}, "num_experts is 4 and n_routed_experts is 8"),
        (V3, {"num_local_experts": 4}, "num_local_experts is 4 and n_routed_experts is 8"),
    ],
)
def test_spellings_that_differ_are_refused_since_versions_of_transformers_disagree(
    base, changes, message
):
    Config = models.get(base.get("model_type", "llama")).Config
    with refused("expected one of them or the same", message, error=models.ModelError):
        Config.from_hf(base | changes)


def test_a_missing_key_is_named():
    for key in SHORT:
        with refused(key, error=models.ModelError):
            llama.Config.from_hf({k: v for k, v in BASE.items() if k != key})


@pytest.mark.parametrize("model_type", ["gpt2", None, ["llama"]])
def test_an_unknown_model_type_is_refused_with_those_that_are_known(model_type):
    with refused("deepseek_v2", "llama", error=models.ModelError):
        models.get(model_type)
    assert models.get("llama") is llama


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        (LLAMA, {"is_causal": False}, "is_causal is False, but only True is supported"),
        (MISTRAL, {"layer_types": ["full_attention"]}, "layer_types is ['full_attention'], but"),
        (LLAMA, {"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        (LLAMA, {"attention_dropout": 0.1}, "attention_dropout is 0.1, but only 0.0"),
        (LLAMA, {"quantization_config": {}}, "quantization_config is {}, but only None"),
        (LLAMA, {"rope_scaling": {"type": "longrope"}}, "rope_scaling.rope_type is 'longrope'"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing, expected"),
        (LLAMA, {"rope_parameters": BY_2 | {"factor": -2}}, "rope_parameters.factor is -2"),
        (LLAMA, {"rope_parameters": BY_2 | {"beta_fast": 32}}, "rope_parameters.beta_fast is not"),
        (LLAMA, {"rope_scaling": {"type": []}}, "rope_scaling.rope_type is [], expected one of: "),
        (LLAMA, {"rope_theta": 1e-320}, "rope_theta is 1e-320, expected one from 1.2e-38 to 3.4e+"),
        (LLAMA, {"initializer_range": 1e308}, "initializer_range is 1e+308, expected one from "),
        (LLAMA, {"vocab_size": 2**31}, "vocab_size is 2147483648, expected an integer"),
        (QWEN2, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (LLAMA, {"rope_parameters": "yarn"}, "rope_parameters is 'yarn', expected a table"),
        (LLAMA, {"hidden_size": "32"}, "hidden_size is '32', expected an integer above 0"),
        (LLAMA, {"hidden_size": 30}, "hidden_size is 30, expected a multiple"),
        (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of"),
        (LLAMA, {"head_dim": 7}, "head_dim is 7, expected an even number"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer above 0"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number above 0"),
        (LLAMA, {"eos_token_id": [1, "</s>"]}, "eos_token_id is (1, '</s>'), expected a token id"),
        (V3, {"hidden_act": "gelu"}, "hidden_act is 'gelu', but only 'silu' is supported"),
        (V3, {"is_causal": False}, "is_causal is False, but only True is supported"),
        (V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax', but only 'sigmoid'"),
        (V3, {"topk_method": "greedy"}, "topk_method is 'greedy', but only 'noaux_tc'"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq is 2, but only 1"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq is 2, but only 1"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob is True, but only False"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', but only 'softmax'"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', expected greedy"),
        (V2, {"num_experts_per_tok": None}, "num_experts_per_tok is None, expected an integer"),
        (V2, LIMITED | {"n_group": None}, "n_group is None, expected an integer above 0"),
        (V2, LIMITED | {"n_group": 3}, "n_routed_experts is 8, expected a multiple of n_group (3)"),
        (V3, {"topk_group": None}, "topk_group is None, expected an integer above 0"),
        (V3, {"n_group": 8}, "n_group is 8, expected at most 4: 2 of the n_routed_experts (8)"),
        (V3, {"topk_group": 5}, "topk_group is 5, expected at most n_group (4)"),
        (V3, {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected at most 4"),
        (V2, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, expected at most 8"),
        (V3, {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected num_attention_heads"),
        (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7, expected an even number"),
        (V3, {"qk_rope_head_dim": None}, "qk_rope_head_dim is None, expected an integer above 0"),
        (V3, {"q_lora_rank": 0}, "q_lora_rank is 0, expected an integer above 0"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1, expected an integer"),
        (V3, {"first_k_dense_replace": True}, "first_k_dense_replace is True, expected an integer"),
        (QWEN2, ON | {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (QWEN2, ON | {"layer_types": ["chunked"] * 3}, "layer_types has 'chunked'"),
        (QWEN2, ON | {"layer_types": "full"}, "layer_types is 'full', expected a list"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 3}, "expected sliding_window to be set"),
        (QWEN2, ON | {"max_window_layers": None}, "max_window_layers is None, expected an"),
        (QWEN2, {"use_sliding_window": "no"}, "use_sliding_window is 'no', expected true or false"),
    ],
)  # fmt: skip
def test_an_unsupported_config_is_refused_by_key_and_value(base, changes, message):
    with refused(message, error=models.ModelError):
        models.get(base["model_type"]).Config.from_hf(base | changes)


NAN, INF = float("nan"), float("inf")
ODD = (
    *(NAN, INF, -1, 0, 1, 1.5, 1e308, 5e-324, 10**30, 10**400, True, None),
    *("", "x", "\x1b[31m\n", [], {}, [NAN], [[]], {"a": 1}, "default", "yarn", 2**31 - 1),
)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("base", [LLAMA, QWEN2, V2, V3], ids=lambda base: base["model_type"])
def test_any_config_is_read_whole_or_refused_in_one_line(base, seed):
    """What is read is written as JSON, read again as it was, and neither loops nor allocates."""
    rng, Config = random.Random(seed), models.get(base["model_type"]).Config
    keys = sorted({*Config.from_hf(base).to_hf(), *Config.DEFAULTS, *Config.OTHER_NAMES})
    table = [*(field.name for field in fields(Rope)), "type", "partial_rotary_factor"]
    read = 0
    for _ in range(2000):
        changes = {key: rng.choice(ODD) for key in rng.sample(keys, rng.choice((1, 1, 1, 2)))}
        if rng.random() < 0.5:
            kind = {"rope_type": rng.choice(list(TYPES)), "factor": 2.0}
            odd = {key: rng.choice(ODD) for key in rng.sample(table, 2)}
            changes |= {rng.choice(("rope_scaling", "rope_parameters")): kind | odd}
        try:
            config = Config.from_hf(base | changes)
        except models.ModelError as error:
            assert "\n" not in str(error) and "\x1b" not in str(error)
            continue
        read += 1
        written = json.loads(json.dumps(config.to_hf(), allow_nan=False))
        assert Config.from_hf(written) == config
    assert 100 < read < 1900
