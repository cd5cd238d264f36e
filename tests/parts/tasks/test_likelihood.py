"""Scores of requests, by a small causal model that NumPy computes as well."""

from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.programs.placement import DeviceGroup
from parts.tasks import task_model
from parts.tasks.task_model import TaskModel, cheapest_lengths, padded_length, program
from tests.errors import refused

VOCAB, CONTEXT = 11, 40
TABLE_VV = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32)


def features(params, tokens_BT):
    """The mean of what the tokens so far stand for: whoever sees another context sees it here."""
    x_BTD = jnp.cumsum(params[tokens_BT], axis=1)
    return (x_BTD / jnp.arange(1, tokens_BT.shape[1] + 1)[:, None]).reshape(-1, VOCAB)


SCORE = program(features, lambda params: 3 * params.T)


def score(requests, batch_size=4, devices=2, per_group=1, **given):
    own = jax.devices()[:devices]
    groups = [DeviceGroup(tuple(own[n : n + per_group])) for n in range(0, devices, per_group)]
    params_on = {group: group.put(TABLE_VV) for group in groups}
    return model(SCORE, params_on, batch_size).log_likelihoods(requests, **given)


def model(program, params_on, batch_size):
    return TaskModel(program, None, params_on, None, CONTEXT, VOCAB, batch_size, 0, ())


def expected(before, continuation):
    """One token after another, in float64."""
    whole, total, greedy = [*before, *continuation], 0.0, True
    for place in range(len(before), len(whole)):
        seen = whole[max(0, len(whole) - 1 - CONTEXT) : place]
        logits_V = 3 * TABLE_VV.astype(np.float64) @ TABLE_VV[seen].mean(axis=0)
        total += logits_V[whole[place]] - np.log(np.exp(logits_V).sum())
        greedy &= bool(logits_V.argmax() == whole[place])
    return total, greedy


def draw(count, seed=0, longest=70):
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(1, longest, count), rng.integers(1, 9, count), strict=True)
    return [[rng.integers(VOCAB, size=n).tolist() for n in pair] for pair in lengths]


def check(found, requests):
    assert len(found) == len(requests)
    for score, (before, continuation) in zip(found, requests, strict=True):
        total, greedy = expected(before, continuation)
        assert score.log_likelihood == pytest.approx(total, abs=1e-4)
        assert (score.greedy, score.tokens) == (greedy, len(continuation))


def test_scores_are_those_of_one_token_after_another_in_the_order_of_requests():
    requests = draw(23)  # short ones, and some longer than the context
    likeliest = []
    for _ in range(3):
        seen = [5, *likeliest]
        likeliest.append(int(np.argmax(TABLE_VV @ TABLE_VV[seen].mean(axis=0))))
    requests.append([[5], likeliest])
    found = score(requests)
    check(found, requests)
    assert found[-1].greedy and not all(one.greedy for one in found)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_size_of_a_lot_and_its_devices_change_no_score(batch_size):
    requests = draw(9, seed=1)
    check(score(requests, batch_size=batch_size, devices=2, per_group=2), requests)


def counting(lots):
    """The program, which also appends the tokens of each lot to `lots`."""

    def counted(params, tokens_BT, *given):
        lots.append(np.asarray(tokens_BT))
        return SCORE(params, tokens_BT, *given)

    return counted


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_the_length_of_a_row_does_not_depend_on_its_lot(batch_size, monkeypatch):
    """So by rules a score has the same bits on machines that compute other lots."""
    monkeypatch.setattr(task_model, "COMPILING", 1.0)  # each length is worth a program
    requests = [([1] * length, [2]) for length in (3, 8, 20, 23, 30, 40)]
    group = DeviceGroup((jax.devices()[0],))
    model(counting(lots := []), {group: TABLE_VV}, batch_size).log_likelihoods(requests)
    found = {row.sum(): row.size for lot in lots for row in lot if row.any()}
    assert found == {3: 16, 8: 16, 20: 24, 23: 24, 30: 32, 40: 40}


def test_the_choices_of_a_question_share_a_row():
    questions = [[1, 2, 3], [4, 5, 6, 7]]
    requests = [[question, [choice]] for question in questions for choice in range(4)]
    group = DeviceGroup((jax.devices()[0],))
    lots = []
    check(model(counting(lots), {group: TABLE_VV}, 2).log_likelihoods(requests), requests)
    assert [lot[:, :4].tolist() for lot in lots] == [[[1, 2, 3, 0], [4, 5, 6, 7]]]
    requests = [[[3], [number % VOCAB]] for number in range(40)]  # more than there is room for
    check(score(requests), requests)


def test_each_request_is_counted_once_it_is_scored():
    done = []
    score(draw(10), advance=done.append)
    assert sum(done) == 10 and len(done) > 1


@pytest.mark.parametrize(
    "request_", [([], [1]), ([1], []), ([1], [2] * (CONTEXT + 1))], ids=["bare", "empty", "long"]
)
def test_what_cannot_be_scored_is_refused(request_):
    with refused("request 1", 40):
        score([([1], [2]), request_])


def test_rows_are_padded_to_few_lengths_and_never_beyond_the_context():
    lengths = {padded_length(n, 300) for n in range(1, 301)}
    assert sorted(lengths) == [16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 300]
    assert all(n <= padded_length(n, 300) for n in range(1, 301))
    assert padded_length(3, 5) == 5


@pytest.mark.parametrize("compiling", [0, 40, 1000, 10**6])
def test_no_other_lengths_cost_less_than_those_that_are_compiled_for(compiling):
    rows_of = {16: 40, 24: 3, 32: 9, 48: 20, 64: 1, 80: 7}

    def cost(lengths):
        padded = (n * min(x for x in lengths if x >= length) for length, n in rows_of.items())
        return sum(padded) + compiling * len(lengths)

    some = [c for n in range(6) for c in combinations(sorted(rows_of)[:-1], n)]
    found = cheapest_lengths(rows_of, compiling)
    assert cost(found) == min(cost((*one, 80)) for one in some)
    assert found == tuple(sorted(rows_of)) if compiling == 0 else len(found) < 6
