"""Which keys a query sees: those of its window, in each layer, and of its own packed sequence."""

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
from tests.models.reference import BASE, GROUPS, LATENT
from tests.models.reference import TOKENS as LONG

SMALL = BASE | {"num_hidden_layers": 3}
ON = {"use_sliding_window": True, "sliding_window": 4}
DRAWN = BASE | {"initializer_range": 0.2}  # large enough that attention matters
MODELS = {
    "llama": DRAWN,
    "mistral": DRAWN | {"sliding_window": 3},
    "qwen2": DRAWN | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "deepseek_v3": DRAWN | LATENT | GROUPS,
}
LENGTHS = (5, 1, 9, 4)  # of the sequences in a row; 2 of 21 are left, which is padding
ROW = 21
SEQUENCES = np.repeat(np.arange(5), [*LENGTHS, 2]).astype(np.int32)
POSITIONS = np.concatenate([np.arange(n) for n in (*LENGTHS, 2)]).astype(np.int32)
TOKENS = np.random.default_rng(0).integers(0, 96, (2, ROW)).astype(np.int32)


def made(name):
    model = models.get(name)
    config = model.Config.from_hf(MODELS[name] | {"model_type": name})
    return model, config, model.init(config, 0)


def rows(values):
    """The same of both rows."""
    return jnp.asarray(np.stack([values, values]))


@pytest.mark.parametrize("kernel", ["matmul", "xla"])
@pytest.mark.parametrize(
    "window, packed",
    [(None, True), (3, True), *((window, False) for window in (1, 4, 9, 20, 21, 50))],
)
def test_a_query_sees_its_window_of_its_own_sequence_and_nothing_else(window, packed, kernel):
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, ROW, 1, *m)).astype(np.float32) for m in ((2, 4), (4,), (4,)))
    # rows are packed differently; a number may come again
    of_rows = np.stack([SEQUENCES, np.roll(SEQUENCES, 4)]) * packed
    how = {"window": window, "kernel": kernel}
    how |= {"sequences_BT": jnp.asarray(of_rows)} if packed else {}
    found = jax.jit(partial(attend, **how))(q, k, v).reshape(2, ROW, 2, 4)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    for row, place, head in np.ndindex(2, ROW, 2):
        first = 0 if window is None else max(0, place - window + 1)
        seen = [s for s in range(first, place + 1) if of_rows[row, s] == of_rows[row, place]]
        weights = np.exp(k[row, seen, 0] @ q[row, place, 0, head])
        expected = weights @ v[row, seen, 0] / weights.sum()
        np.testing.assert_allclose(found[row, place, head], expected, atol=1e-5)


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


@pytest.mark.long
def test_layers_of_different_windows_are_not_left_to_a_fused_kernel():
    config = qwen2.Config.from_hf(SMALL | ON | {"max_window_layers": 1})
    params = qwen2.init(config, 0)
    how = {"scan": True, "dtype": jnp.float32, "attention": "xla"}
    with pytest.raises(models.ModelError, match="'xla' takes one window for all layers"):
        qwen2.apply(config, params, LONG, **how)
    wide = qwen2.Config.from_hf(SMALL | ON | {"max_window_layers": 1, "sliding_window": 37})
    qwen2.apply(wide, params, LONG, **how)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "qwen2" else [pytest.mark.soak]) for name in MODELS],
)
def test_a_packed_row_gives_what_its_sequences_give_alone(name):
    model, config, params = made(name)
    weight_TV = np.random.default_rng(2).normal(size=(ROW, 96)).astype(np.float32)
    # each sequence at the beginning of a row of its own, and after it what it cannot see
    alone = np.zeros((2, 5, ROW), np.int32)
    alone[:, SEQUENCES, POSITIONS] = TOKENS

    def logits(params, tokens_BT, **how):
        return model.apply(config, params, tokens_BT, dtype=jnp.float32, **how)

    def of_packed(params):
        # scanned and computed again, so that what the layers close over has to come along
        how = {"scan": True, "remat": "nothing_saveable"}
        given = {"positions_BT": rows(POSITIONS), "sequences_BT": rows(SEQUENCES)}
        logits_BTV = logits(params, TOKENS, **how, **given)
        return (logits_BTV * weight_TV).sum(), logits_BTV

    def of_alone(params):
        logits_BTV = logits(params, alone.reshape(10, ROW), scan=False)
        logits_BTV = logits_BTV.reshape(2, 5, ROW, 96)[:, SEQUENCES, POSITIONS]
        return (logits_BTV * weight_TV).sum(), logits_BTV

    (_, found), grads = jax.jit(jax.value_and_grad(of_packed, has_aux=True))(params)
    (_, expected), expected_grads = jax.jit(jax.value_and_grad(of_alone, has_aux=True))(params)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    for (path, grad), other in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(expected_grads), strict=True
    ):
        if "correction" not in str(path):  # counts of tokens, not a gradient
            scale = np.abs(other).max()
            np.testing.assert_allclose(grad, other, atol=1e-4 * scale, err_msg=str(path))
