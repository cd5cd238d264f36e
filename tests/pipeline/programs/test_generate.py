"""Writing token by token, with a model whose logits are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.programs.generate import generate

VOCAB = 7


def next_is_one_more(params, tokens_BT):
    """The likeliest next token is the last one plus one."""
    return params * jax.nn.one_hot((tokens_BT + 1) % VOCAB, VOCAB)


def sum_of_all(params, tokens_BT):
    """The likeliest next token is the sum of all that the model was shown."""
    return params * jax.nn.one_hot(jnp.cumsum(tokens_BT, axis=1) % VOCAB, VOCAB)


def write(apply=next_is_one_more, prompt=(3,), sharpness=9.0, **changes):
    settings = {"max_new_tokens": 5, "context": 64, "temperature": 0.0, "seed": 0, "ends": ()}
    return generate(apply, jnp.float32(sharpness), list(prompt), **settings | changes)


def test_temperature_zero_takes_the_likeliest_token():
    assert write() == [4, 5, 6, 0, 1]


def test_an_end_token_ends_the_text_and_is_returned():
    assert write(ends=(6,)) == [4, 5, 6]


@pytest.mark.parametrize("length", [1, 3, 8])
def test_beyond_the_context_the_first_tokens_drop_out_of_sight(length):
    tokens = [3, 5]
    for _ in range(6):
        tokens.append(sum(tokens[-length:]) % VOCAB)
    found = write(sum_of_all, prompt=(3, 5), context=length, max_new_tokens=6)
    assert found == tokens[2:]


def test_a_token_is_a_pure_function_of_what_stands_before_it():
    whole = write(temperature=1.0, sharpness=1.0, max_new_tokens=12)
    again = write(
        prompt=(3, *whole[:4]), temperature=1.0, sharpness=1.0, max_new_tokens=8, context=64
    )
    assert again == whole[4:]


def test_another_seed_draws_another_text():
    drawn = {
        tuple(write(temperature=1.0, sharpness=1.0, max_new_tokens=12, seed=seed))
        for seed in range(4)
    }
    assert len(drawn) == 4


def test_draws_follow_the_softmax_at_the_given_temperature():
    logits_V = jnp.array([0.0, 1.0, 2.0, -1.0, 0.5, -30.0, 0.0])

    def fixed(params, tokens_BT):
        return jnp.broadcast_to(logits_V, (*tokens_BT.shape, VOCAB))

    drawn = write(fixed, temperature=2.0, max_new_tokens=1500, context=1)
    found_V = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    np.testing.assert_allclose(found_V, jax.nn.softmax(logits_V / 2), atol=0.05)
