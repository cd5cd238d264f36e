"""next_line asked of a model: the held-out text, requests, and the shares of right answers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from lockstep.programs.columns import PLAIN
from parts.tasks import next_line_task
from parts.tasks.next_line import Question
from parts.tasks.next_line_task import AskedQuestions, Scores
from pipeline import runfile
from tests import tiny
from tests.errors import refused
from tests.parts.tasks.test_two_parts import CONTEXT, joining_tokenizer
from tests.pipeline import trained_run
from tests.pipeline.tokens.shards_folder import rows_of, shards_folder

BEGINNING = 0
QUESTIONS = [
    Question(
        "def f(x):", ("\n    return x", "\n    return 1 + x", "\n    pass  # x", "\n    x"), 1, 0
    ),
    Question("a = 1", ("\nb = 2", "\nc = 3", "\nd = \u00e9", "\ne = 5 * a"), 0, 1),
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
        asked = [Question("context", texts, answer, 0)] * 2
        scores = Scores(np.array([after] * 2), np.array([alone] * 2))
        metrics = next_line_task.metrics(asked, scores)
        found = {name: metric.value for name, metric in metrics.items()}
        assert found == {name: float(place == answer) for name, place in best.items()}


def test_questions_of_one_document_count_as_one_for_the_standard_error():
    """Ten documents of twenty questions, answered alike: the error is that of ten, not of 200."""
    asked = [Question("context", ("a", "b", "c", "d"), 0, n // 20) for n in range(200)]
    right_N = np.arange(200) // 20 < 4
    after_NC = np.where(right_N[:, None], [0.0, -1, -1, -1], [-1.0, 0, -1, -1])
    metric = next_line_task.metrics(asked, Scores(after_NC, np.zeros((200, 4))))["acc"]
    assert metric.value == pytest.approx(0.4)
    assert metric.stderr == pytest.approx(math.sqrt(0.4 * 0.6 / 9))
    alone = [question._replace(document=n) for n, question in enumerate(asked)]
    metric = next_line_task.metrics(alone, Scores(after_NC, np.zeros((200, 4))))["acc"]
    assert metric.stderr == pytest.approx(math.sqrt(0.4 * 0.6 / 199))


def test_bytes_are_counted_not_characters():
    asked = [Question("context", ("\n" + "\u00e9" * 8, "\n" + "a" * 10, "\nb", "\nc"), 0, 0)] * 2
    scores = Scores(np.array([[-12.0, -11.0, -9.0, -9.0]] * 2), np.zeros((2, 4)))
    # by 9 characters the first would lose to the second, by 17 bytes it wins
    assert next_line_task.metrics(asked, scores)["acc_bytes"].value == 1


LENGTH, END = 16, 0
TEXTS = ("def f():\n    return '\u00e9'\n", "x = 1\n", "class A:\n    pass\n" * 4)


@pytest.fixture
def read(tmp_path):
    """Writes files of tokens as a held-out split, and reads its documents."""

    def read(*files: list[int], columns=PLAIN, sequences: int = 4, rows=None) -> list[str]:
        run_file, size = tmp_path / "run.toml", 2 if rows is None else 4
        changes = {"model__LLM__max_seq_len": LENGTH, "held_out__sequences": sequences}
        tiny.write_run(run_file, tiny.run_document(tmp_path, **changes))
        train = [[END] * 64 * len(columns)]
        more = {"columns": columns, "rows": rows}
        shards_folder(tmp_path, train, files, size=size, vocab=None, **more)
        found = next_line_task.documents(
            runfile.load(run_file), tmp_path, trained_run.make_tokenizer()
        )
        return [*found]

    return read


def tokens() -> list[int]:
    tokenizer = trained_run.make_tokenizer()
    return [token for text in TEXTS for token in (*tokenizer.encode(text).ids, END)]


def test_documents_are_the_texts_that_were_tokenized(read):
    padded = tokens() + [END] * (-len(tokens()) % LENGTH)
    assert [text for text in read(padded) if text] == [*TEXTS]


def test_a_document_that_continues_in_another_file_is_two(read):
    first = tokens()[:LENGTH]
    found = [text for text in read(first, first) if text]
    assert found == [TEXTS[0][:LENGTH]] * 2


def test_only_so_many_tokens_are_read_spread_over_the_split(read, monkeypatch):
    monkeypatch.setattr(next_line_task, "MOST_TOKENS", 4 * LENGTH)
    monkeypatch.setattr(next_line_task, "STRETCH_SEQUENCES", 2)
    tokenizer = trained_run.make_tokenizer()
    letters = tokenizer.encode("abcdefghijkl").ids
    found = read(
        *(
            [a] * 2 * LENGTH + [b] * 2 * LENGTH
            for a, b in zip(letters[::2], letters[1::2], strict=True)
        )
    )
    assert [len(text) for text in found] == [2 * LENGTH] * 2
    assert [text[0] for text in found] != ["a", "b"]


ARRAYS = rows_of(x=np.zeros((1, LENGTH), np.uint32))


@pytest.mark.parametrize(
    "kind", [{"sequences": 0}, {"columns": ("inputs", "labels")}, {"rows": ARRAYS}]
)
def test_where_nothing_is_held_out_or_rows_are_not_tokens_alone_there_are_no_documents(read, kind):
    assert read([5] * 2 * LENGTH, **kind) == []


def test_it_asks_about_the_line_break_where_a_token_joins_it_to_the_context():
    tokenizer = joining_tokenizer()
    model = SimpleNamespace(tokenizer=tokenizer, beginning=0, context=64)
    question = Question(CONTEXT, ("\n    if a:", "\n    return a", "\n    x = 1", "\n    b"), 1, 0)
    asked = next_line_task.ask([question], model, 1)
    for (before, after), choice in zip(asked.requests[:4], question.choices, strict=True):
        assert tokenizer.decode([*before, *after]) == CONTEXT + choice
    assert [tokenizer.decode(after) for _, after in asked.requests[4:]] == [*question.choices]
