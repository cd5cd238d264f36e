"""A text that grows, token by token or in chunks, beside the whole text at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import models
from tests.models.reference import BASE, GROUPS, LATENT, SCALED, TOKENS

pytestmark = pytest.mark.long

WINDOW = {"sliding_window": 5, "use_sliding_window": True}
DYNAMIC = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 20}
CASES = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "llama, dynamic rope, slots beyond its length": ("llama", DYNAMIC),
    "mistral": WINDOW,
    "qwen2": WINDOW | {"max_window_layers": 1},
    "qwen3": {},
    "deepseek_v2": LATENT | GROUPS | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT | GROUPS | SCALED,
}
CHUNK, GROWN = 4, 20  # tokens at once, in the first two steps; and of all
UNROLLED = "llama, dynamic rope, slots beyond its length", "mistral"  # others are like one of these
SCANNED = "qwen2", "deepseek_v3"
FIRST = 3  # slot in which the second row begins
AHEAD = 4  # slots that stay free


@pytest.mark.parametrize(
    ("case", "scan"),
    [
        pytest.param(case, scan, marks=[] if case in quick else [pytest.mark.soak])
        for scan, quick in ((False, UNROLLED), (True, SCANNED))
        for case in CASES
    ],
)
def test_a_text_in_chunks_and_tokens_has_the_logits_of_the_whole(case, scan):
    """Two rows, of which the second begins later: padding before it changes nothing."""
    name, changes = CASES[case] if isinstance(CASES[case], tuple) else (case, CASES[case])
    model = models.get(name)
    config = model.Config.from_hf(BASE | changes | {"initializer_range": 0.1})
    params = model.init(config, 0)
    tokens_BT = TOKENS[:, :GROWN]

    @jax.jit
    def grown(params, tokens_BT):
        step = partial(model.step, config, params)
        cache = model.cache(config, [0, FIRST], GROWN + AHEAD, jnp.float32)

        def some(cache, tokens_BT):
            x_ND, cache = step(tokens_BT, cache)
            return cache, x_ND.reshape(*tokens_BT.shape, -1)

        chunks_2BT = jnp.stack([tokens_BT[:, :CHUNK], tokens_BT[:, CHUNK : 2 * CHUNK]])
        cache, x_2BTD = lax.scan(some, cache, chunks_2BT)
        _, x_TB1D = lax.scan(some, cache, tokens_BT[:, 2 * CHUNK :].T[:, :, None])
        x_BTD = jnp.concatenate([*x_2BTD, x_TB1D[:, :, 0].swapaxes(0, 1)], axis=1)
        return x_BTD @ model.head(config, params)

    @jax.jit
    def whole(params, tokens_BT):
        return model.apply(config, params, tokens_BT, scan=scan, dtype=jnp.float32)

    found = np.asarray(grown(params if scan else model.by_layer(params), tokens_BT))
    shifted_BT = np.stack([tokens_BT[0], np.roll(tokens_BT[1], -FIRST)])
    expected = np.asarray(whole(params, shifted_BT))
    largest = np.abs(expected).max()
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5 * largest)
    np.testing.assert_allclose(found[1, FIRST:], expected[1, :-FIRST], rtol=0, atol=1e-5 * largest)
    assert np.isfinite(found).all()
