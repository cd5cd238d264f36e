"""Questions as requests, and the shares of right answers."""

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from parts.tasks import next_line_task
from parts.tasks.next_line import Question
from parts.tasks.next_line_task import AskedQuestions, Scores
from parts.tasks.task_model import Likelihood
from pipeline.scores import Metric, TaskResult, interval, wilson
from tests.errors import refused
from tests.pipeline import trained_run

BEGINNING = 0
QUESTIONS = [
    Question(
        "def f(x):", ("\n    return x", "\n    return 1 + x", "\n    pass  # x", "\n    x"), 1
    ),
    Question("a = 1", ("\nb = 2", "\nc = 3", "\nd = \u00e9", "\ne = 5 * a"), 0),
]


def make_tokenizer():
    merges = [("\u010a", "\u0120"), ("r", "e"), ("x", ")")]
    return trained_run.make_tokenizer(words=["\u010a\u0120", "re", "x)"], merges=merges)


def asked_of(tokenizer, context: int = 64, count: int = 9) -> AskedQuestions:
    model = SimpleNamespace(tokenizer=tokenizer, beginning=BEGINNING, context=context)
    return next_line_task.ask(QUESTIONS, model, count)


def test_a_choice_after_its_context_has_the_tokens_of_the_whole_text():
    tokenizer = make_tokenizer()
    asked = asked_of(tokenizer)
    assert asked.questions == QUESTIONS
    requests = iter(asked.requests)
    for question in QUESTIONS:
        for choice in question.choices:
            before, continuation = next(requests)
            assert before == tokenizer.encode(question.context).ids
            assert [*before, *continuation] == tokenizer.encode(question.context + choice).ids
        for choice in question.choices:
            assert next(requests) == ([BEGINNING], tokenizer.encode(choice).ids)
    assert not [*requests]
    assert asked_of(tokenizer, count=1).questions == QUESTIONS[:1]


def test_a_question_is_left_out_if_a_choice_of_it_does_not_fit_into_the_model():
    longest = [
        max(len(make_tokenizer().encode(choice).ids) for choice in question.choices)
        for question in QUESTIONS
    ]
    assert longest[0] > longest[1]
    asked = asked_of(make_tokenizer(), longest[1])
    assert (asked.questions, len(asked.requests)) == (QUESTIONS[1:], 8)
    assert asked_of(make_tokenizer(), longest[1] - 1).questions == []


def test_a_line_without_a_token_is_one_line_of_an_error():
    tokenizer = Tokenizer(models.WordLevel({"def": 0}))
    with refused("next_line"):
        asked_of(tokenizer)


def test_each_metric_chooses_by_its_own_rule():
    # lengths in bytes: 5, 10, 5, 5; each rule finds another choice best
    texts = ("\naaaa", "\naaaaaaaaa", "\nbbbb", "\ncccc")
    after, alone = [-4.0, -6.0, -5.0, -9.0], [-4.0, -6.0, -9.0, -9.5]
    best = {"acc": 0, "acc_bytes": 1, "acc_mutual_info": 2}
    for answer in range(4):
        asked = [Question("context", texts, answer)] * 2
        scores = Scores(np.array([after] * 2), np.array([alone] * 2))
        metrics = next_line_task.metrics(asked, scores)
        found = {name: metric.value for name, metric in metrics.items()}
        assert found == {name: float(place == answer) for name, place in best.items()}


def test_bytes_are_counted_not_characters():
    asked = [Question("context", ("\n" + "\u00e9" * 8, "\n" + "a" * 10, "\nb", "\nc"), 0)] * 2
    scores = Scores(np.array([[-12.0, -11.0, -9.0, -9.0]] * 2), np.zeros((2, 4)))
    # by 9 characters the first would lose to the second, by 17 bytes it wins
    assert next_line_task.metrics(asked, scores)["acc_bytes"].value == 1


def test_scores_are_of_the_choices_in_their_order():
    given = [Likelihood(-float(number), False, 1) for number in range(16)]
    found = next_line_task.scores_of(AskedQuestions(QUESTIONS, []), given)
    assert found.after_NC.tolist() == [[0, -1, -2, -3], [-8, -9, -10, -11]]
    assert found.alone_NC.tolist() == [[-4, -5, -6, -7], [-12, -13, -14, -15]]


@pytest.mark.parametrize(("right", "count"), [(0, 20), (5, 20), (151, 500), (20, 20)])
def test_at_the_ends_of_wilsons_interval_the_share_is_1_96_standard_errors_away(right, count):
    share, ends = right / count, wilson(right / count, count)
    for true in ends:  # whose own standard error counts, not that of the share
        assert (share - true) ** 2 == pytest.approx(1.959964**2 * true * (1 - true) / count)
    assert 0 <= ends[0] <= share <= ends[1] <= 1


def test_an_interval_is_two_standard_errors_where_the_number_is_no_share():
    def result(**metrics):
        return TaskResult("t", metrics, None, 100, 0, "", "")

    metric = Metric(2.5, 0.1)
    assert interval(result(bits_per_byte=metric), "bits_per_byte") == pytest.approx(
        (2.304, 2.696), abs=1e-3
    )
    assert interval(result(word_perplexity=Metric(9.0, None)), "word_perplexity") is None
