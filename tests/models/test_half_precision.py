"""Every model in bfloat16 and float16 against PyTorch's: what is computed, and files.

Two ways to round as often end at different numbers, so ours are not held against PyTorch's own, but
both against what PyTorch computes in float32 of the same weights: ours lie as far from it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from pipeline.weights import hf
from tests.models.reference import drawn
from tests.models.test_parity import CASES

NAMES = (
    "llama, grouped queries",
    "mistral, window",
    "qwen2, tied embeddings",
    "qwen3",
    "deepseek_v2, groups, yarn",
    "deepseek_v3",
)
DTYPES = ("bfloat16", "float16")
TOKENS = np.random.default_rng(0).integers(0, 96, (4, 37)).astype(np.int32)


@pytest.fixture(scope="module", params=NAMES)
def whole(request, tmp_path_factory):
    """A folder in float32."""
    folder = tmp_path_factory.mktemp("whole")
    model = drawn(*CASES[request.param])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(3)  # attention that chooses, so that what it rounds counts
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=DTYPES)
def half(request, whole, tmp_path_factory):
    """A dtype, PyTorch's model in it, and the folder that was saved in."""
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=getattr(torch, request.param))
    saved = tmp_path_factory.mktemp("half")
    model.save_pretrained(saved)
    return request.param, model, saved


def test_there_is_a_case_of_every_model():
    assert {CASES[name][0] for name in NAMES} == {model_type for model_type, _ in CASES.values()}


def test_logits_are_as_near_float32_as_those_of_pytorch(half):
    """A router's choice jumps where rounding moves one expert past another, at another token here
    than there: so the token in the middle is compared, and how many lie far off is limited."""
    dtype, reference, folder = half
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected, theirs = (
            model(torch.from_numpy(TOKENS).long()).logits.float().numpy()
            for model in (exact, reference)
        )
    hf_config, params = hf.read_folder(folder)
    model, config = hf.model_of(hf_config, "a test")
    apply = jax.jit(
        lambda p: model.apply(config, p, TOKENS, scan=True, dtype=jnp.dtype(dtype)),
        compiler_options={"xla_backend_optimization_level": 0},  # in half the time; as many bits
    )
    found, off = (
        np.sqrt(np.mean((logits_BTV - expected) ** 2, axis=-1))
        for logits_BTV in (apply(params), theirs)
    )
    # below, something is not rounded; above, something more is than there
    assert 0.75 < np.median(found) / np.median(off) < 1.33
    far_ours, far_theirs = (np.mean(distance > 5 * np.median(off)) for distance in (found, off))
    assert far_ours <= far_theirs + 0.05


def test_a_folder_comes_back_byte_for_byte(half, tmp_path):
    """The correction of a DeepSeek V3 too, which is float32 in all of them."""
    dtype, _, folder = half
    hf_config, params = hf.read_folder(folder)
    assert hf_config["dtype"] == dtype
    hf.write_folder(tmp_path, hf_config, params, dtype)
    found, expected = (load_file(at / hf.WEIGHTS) for at in (tmp_path, folder))
    assert found.keys() == expected.keys()
    for tensor, weight in expected.items():
        kept = tensor.endswith("e_score_correction_bias")
        assert found[tensor].dtype == weight.dtype == jnp.dtype("float32" if kept else dtype)
        assert found[tensor].tobytes() == weight.tobytes(), tensor
