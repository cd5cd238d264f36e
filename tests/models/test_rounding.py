"""Frequencies and norms round where PyTorch rounds."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from models.parts import RMSNorm
from models.rope import Rope, scaled_frequencies
from tests.models.reference import BASE

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
