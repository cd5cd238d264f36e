"""Windows of keys: those of each layer, and what a query sees."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.mistral import mistral
from models.parts import attend
from models.qwen2 import qwen2
from models.qwen3 import qwen3
from tests.models.reference import BASE, TOKENS

SMALL = BASE | {"num_hidden_layers": 3}
ON = {"use_sliding_window": True, "sliding_window": 4}


@pytest.mark.parametrize(
    ("model", "changes", "windows"),
    [
        (mistral, {}, (4096,) * 3),
        (mistral, {"sliding_window": None}, (None,) * 3),
        (qwen2, {"sliding_window": 4}, (None,) * 3),
        (qwen2, ON, (None,) * 3),  # from layer 28 on
        (qwen2, ON | {"max_window_layers": 1}, (None, 4, 4)),
        (
            qwen3,
            ON | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (4, None, 4),
        ),
    ],
)
def test_each_layer_has_the_window_that_the_config_gives_it(model, changes, windows):
    config = model.Config.from_hf(SMALL | changes)
    assert config.windows == windows
    assert config.shortened(2).windows == windows[:2]


@pytest.mark.parametrize("kernel", ["matmul", "xla"])
@pytest.mark.parametrize("window", [1, 4, 9, 20, 21, 50])
def test_a_query_sees_its_window_and_nothing_else(window, kernel):
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(1, 21, 1, *more)).astype(np.float32) for more in ((2, 4), (4,), (4,))
    )
    found = jax.jit(partial(attend, window=window, kernel=kernel))(q, k, v).reshape(21, 2, 4)
    for place in range(21):
        seen = slice(max(0, place - window + 1), place + 1)
        for head in range(2):
            weights = np.exp(k[0, seen, 0] @ q[0, place, 0, head])
            expected = weights @ v[0, seen, 0] / weights.sum()
            np.testing.assert_allclose(found[place, head], expected, atol=1e-5)


def test_layers_of_different_windows_are_not_left_to_a_fused_kernel():
    config = qwen2.Config.from_hf(SMALL | ON | {"max_window_layers": 1})
    params = qwen2.init(config, 0)
    with pytest.raises(models.ModelError, match="'xla' takes one window for all layers"):
        qwen2.apply(config, params, TOKENS, scan=True, dtype=jnp.float32, attention="xla")
    wide = qwen2.Config.from_hf(SMALL | ON | {"max_window_layers": 1, "sliding_window": 37})
    qwen2.apply(wide, params, TOKENS, scan=True, dtype=jnp.float32, attention="xla")
