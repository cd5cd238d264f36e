"""Small decoders with PyTorch's beside them, and what tests of models compare by."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import flatten_dict
from transformers import AutoConfig, AutoModelForCausalLM

from models.architecture import Architecture

torch.set_num_threads(1)

BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-2,  # so that a norm which should have 1e-6 shows
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}
TOKENS = np.random.default_rng(0).integers(0, 96, (2, 37)).astype(np.int32)  # no equal quarters


def drawn(model_type: str, changes: dict, std: float = 0.1) -> torch.nn.Module:
    """PyTorch's model with random weights.

    Norms are not one, and biases and corrections not zero, so that no swap of tensors goes unseen.
    """
    keys = copy.deepcopy(BASE | changes)  # transformers writes into the tables that it is given
    reference = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **keys), attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    tensors = [*reference.named_parameters()]
    tensors += [pair for pair in reference.named_buffers() if pair[0].endswith("correction_bias")]
    with torch.no_grad():
        for name, tensor in tensors:
            if "norm" in name:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0, std, generator=generator)
    return reference


def loss_of(model: Architecture, config, params, tokens_BT=TOKENS, **options) -> jax.Array:
    """The mean cross-entropy of the next tokens."""
    options = {"scan": True, "dtype": jnp.float32} | options
    logits_BTV = model.apply(config, params, tokens_BT, **options)
    log_probs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    return -jnp.take_along_axis(log_probs_BTV, tokens_BT[:, 1:, None], -1).mean()


def assert_close(found, expected, tolerance: float) -> None:
    """Every leaf is within `tolerance` of the largest value in the leaf."""
    found, expected = flatten_dict(found, sep="/"), flatten_dict(expected, sep="/")
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        error, largest = np.abs(np.asarray(found[path]) - value).max(), np.abs(value).max()
        assert error <= tolerance * largest, f"{path}: {error / largest}"
