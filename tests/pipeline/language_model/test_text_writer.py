"""Writing token by token, with models whose logits are known."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.language_model.sampling import Draws, Sampling
from pipeline.language_model.text_writer import TextWriter

VOCAB = 7
LOGITS_V = np.array([0.0, 1.0, 2.0, -1.0, 0.5, -30.0, 0.0], np.float32)
PLAIN = Sampling(1.0)


class Model(NamedTuple):
    cache: Callable
    next_logits: Callable
    by_rules: Callable = lambda function: function  # noqa: E731


def next_is_one_more(params, tokens_BT, cache):
    """The likeliest next token is the last one plus one."""
    return params * jax.nn.one_hot((tokens_BT[:, -1] + 1) % VOCAB, VOCAB), cache


def nothing(first_B, length):
    return ()


def no_tokens(first_B, length):
    return {"first_B": first_B, "used": jnp.int32(0), "sum_B": jnp.zeros_like(first_B)}


def sum_of_all(params, tokens_BT, cache):
    """The likeliest next token is the sum of all that the model was shown."""
    slots_T = cache["used"] + jnp.arange(tokens_BT.shape[1])
    own_BT = slots_T >= cache["first_B"][:, None]
    sum_B = cache["sum_B"] + jnp.where(own_BT, tokens_BT, 0).sum(axis=1)
    cache = cache | {"used": cache["used"] + tokens_BT.shape[1], "sum_B": sum_B}
    return params * jax.nn.one_hot(sum_B % VOCAB, VOCAB), cache


ONE_MORE = Model(nothing, next_is_one_more)
SUM = Model(no_tokens, sum_of_all)


@cache
def writer(model=ONE_MORE, sharpness=9.0, context=64, ends=()):
    return TextWriter(model, jnp.float32(sharpness), context=context, ends=ends)


def sums(prompt, count, seen=lambda length: 0):
    """What SUM writes, where the model is shown the text from `seen(its length)` on."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens[seen(len(tokens)) :]) % VOCAB)
    return tokens[len(prompt) :]


def test_the_likeliest_tokens_follow_until_one_ends_the_text():
    assert writer().write([[3]], max_new_tokens=5) == [[4, 5, 6, 0, 1]]
    assert writer(ends=(6, 2)).write([[3], [0], [5]], max_new_tokens=5) == [[4, 5, 6], [1, 2], [6]]


def test_each_row_is_written_as_if_it_were_alone():
    """Prompts of all lengths, across the edge of a chunk, in one batch and in pieces."""
    prompts = [[1, *[2] * (length - 1)] for length in (1, 2, 17, 255, 256, 257, 600)]
    expected = [sums(prompt, 40) for prompt in prompts]
    assert writer(SUM, context=1000).write(prompts, max_new_tokens=40) == expected
    pieces = list(writer(SUM, context=1000).pieces(prompts, max_new_tokens=40, size=16))
    assert [len(piece[0]) for piece in pieces] == [1, 16, 16, 7]
    assert [sum(row, []) for row in zip(*pieces, strict=True)] == expected


@pytest.mark.parametrize("context", [1, 3, 8])
def test_beyond_the_context_a_quarter_of_it_drops_out_of_sight_at_a_time(context):
    at_once = max(1, context // 4)

    def seen(length):
        return next(
            start for start in range(0, length + at_once, at_once) if length - start <= context
        )

    prompts = [[3, 5], [1, 1, 1, 1, 1, 1, 2, 4, 3]]
    found = writer(SUM, context=context).write(prompts, max_new_tokens=12)
    assert found == [sums(prompt, 12, seen) for prompt in prompts]


def test_a_token_is_a_pure_function_of_what_stands_before_it():
    given = {"sampling": PLAIN, "seeds": [5]}
    [whole] = writer(sharpness=1.0).write([[3]], max_new_tokens=12, **given)
    again = writer(sharpness=1.0).write([[3, *whole[:4]]], max_new_tokens=8, **given)
    assert again == [whole[4:]]


def test_a_rows_draws_follow_from_its_seed_wherever_it_stands():
    options = {"max_new_tokens": 12, "sampling": PLAIN}
    prompts, seeds = [[3]] * 3 + [[4, 4]], [0, 1, 2, 1]
    together = writer(sharpness=1.0).write(prompts, **options, seeds=seeds)
    alone = [
        writer(sharpness=1.0).write([prompt], **options, seeds=[seed])[0]
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert together == alone
    assert len({tuple(text) for text in together}) == 4


def test_a_row_ends_when_its_reader_has_seen_enough():
    asked = []

    def done(row, tokens):
        asked.append((row, len(tokens)))
        return row == 0 and len(tokens) > 1

    first, second = writer().write([[0], [1]], max_new_tokens=40, is_done=done)
    assert (len(first), len(second)) == (17, 40)
    assert asked == [(0, 1), (1, 1), (0, 17), (1, 17), (1, 33), (1, 40)]


# ---- Drawing ----


@pytest.mark.parametrize(
    ("sampling", "stays"),
    [
        (Sampling(2.0), [0, 1, 2, 3, 4, 6]),
        (Sampling(2.0, top_k=2), [1, 2]),
        (Sampling(1.0, top_k=4), [0, 1, 2, 4, 6]),  # 0 and 6 are equally likely
        (Sampling(1.0, top_p=0.6), [1, 2]),
        (Sampling(1.0, top_p=1e-6), [2]),
        (Sampling(1.0, top_k=3, top_p=0.8), [1, 2]),
        (Sampling(1.0, top_k=0), [0, 1, 2, 3, 4, 6]),
    ],
)
def test_draws_follow_the_softmax_of_the_tokens_that_stay(sampling, stays):
    rows = 2048
    draws = Draws.seeded(sampling, [3] * rows)
    logits_BV = np.tile(LOGITS_V, (rows, 1))
    found_V = np.bincount(draws.draw(logits_BV, np.arange(rows)), minlength=VOCAB) / rows
    expected_V = np.zeros(VOCAB)
    expected_V[stays] = jax.nn.softmax(LOGITS_V[stays] / sampling.temperature)
    np.testing.assert_allclose(found_V, expected_V, atol=0.04)
    assert set(np.flatnonzero(found_V)) <= set(stays)


@pytest.mark.parametrize("temperature", [1e-29, 1e-38, 1e-60])  # the last is 0 as a float32
def test_a_temperature_next_to_zero_takes_the_likeliest_token(temperature):
    draws = Draws.seeded(Sampling(temperature), [3])
    assert draws.draw(100 * LOGITS_V[None], np.arange(1)).tolist() == [np.argmax(LOGITS_V)]
