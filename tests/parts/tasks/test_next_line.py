"""Questions of next_line: the same from the same text, and answered only by what the text says."""

import hashlib
from itertools import islice

import pytest

from parts.tasks import next_line
from parts.tasks.next_line import CHOICES, CONTEXT_BYTES, LONGEST_LINE, SHORTEST_LINE, Question
from parts.tasks.next_line_task import to_jsonl


def document(name: str, lines: int = 30) -> str:
    """A text whose lines differ, some indented; with blank, short and very long ones."""
    found = [f"# file {name}"]
    for n in range(lines):
        found.append("    " * (n % 3) + f"{name}_{n:02} = call({'x' * (n % 7)}, {n * n})")
        found += {5: [""], 11: ["pass"], 17: [f"{name} = {'y' * LONGEST_LINE}"]}.get(n, [])
    return "\n".join([*found, "# the end"])


def questions(texts: list[str], count: int, seed: int = 0) -> list[Question]:
    return list(islice(next_line.questions(texts, seed), count))


TEXTS = [document(name) for name in ("alpha", "betas", "gamma", "delta")]


def test_equal_text_gives_equal_questions_on_any_machine():
    asked = questions(TEXTS, 50)
    digest = hashlib.sha256(to_jsonl(asked).encode()).hexdigest()
    assert digest == "73dd588468fcde6070ed0df42582cb7021e2ca96315702199eaaa83ec7700ba6"
    assert questions(TEXTS, 20) == asked[:20]
    assert questions(TEXTS, 20, seed=1) != asked[:20]


def test_the_answer_follows_its_context_and_no_other_choice_does():
    for question in questions(TEXTS, 100):
        following = [text for text in TEXTS if question.context in text]
        true = [
            question.context + choice in text for choice in question.choices for text in following
        ]
        assert len(following) == 1 and sum(true) == 1 and true[question.answer]


def test_choices_are_distinct_and_alike_in_length_and_indentation_and_of_other_documents():
    for question in questions(TEXTS, 100):
        lines = [choice.removeprefix("\n") for choice in question.choices]
        assert len({line.strip() for line in lines}) == CHOICES
        assert len({len(line) - len(line.lstrip()) for line in lines}) == 1
        sizes = [len(line.strip()) for line in lines]
        assert min(sizes) >= SHORTEST_LINE and max(sizes) - min(sizes) <= 6
        names = [line.split("_")[0].strip() for line in lines]
        assert names.count(names[question.answer]) == 1


def test_contexts_are_whole_lines_up_to_their_limit_and_end_in_no_white_space():
    for question in questions(TEXTS, 100):
        assert 0 < len(question.context.encode()) <= CONTEXT_BYTES
        assert question.context == question.context.rstrip()
        (text,) = (text for text in TEXTS if question.context in text)
        assert all(line in text.split("\n") for line in question.context.split("\n"))


def test_answers_stand_at_each_place():
    places = [question.answer for question in questions(TEXTS, 100)]
    assert len(places) > 80
    assert all(places.count(place) > 10 for place in range(CHOICES))


@pytest.mark.parametrize(
    "line",
    ["pass", "y" * (LONGEST_LINE + 1), "z = '\ufffd a part of a character'"],
    ids=["short", "long", "cut"],
)
def test_a_line_that_says_too_little_or_is_damaged_is_not_asked_for(line):
    texts = ["\n".join(["first", f"before = {name}", line, "after", "last"]) for name in "abcdef"]
    assert questions(texts, 10) == []


def test_the_first_and_last_line_of_a_part_may_be_cut_and_are_not_asked_for():
    words = "one line of a document that is long enough"
    texts = [f"{name} {words}\n{name} and {words}\n{name} or {words}" for name in "abcdefgh"]
    assert questions(texts, 10) == []
    more = [f"top\n{text}\nend" for text in texts]
    assert len(questions(more, 99)) == 2 * len(more)


def test_one_document_alone_has_choices_of_its_own():
    for question in questions(TEXTS[:1], 10):
        assert all(choice in TEXTS[0] or choice.strip() in TEXTS[0] for choice in question.choices)
        assert not any(
            choice.strip() in question.context
            for number, choice in enumerate(question.choices)
            if number != question.answer
        )


def test_a_line_that_is_often_true_is_as_often_another_choice():
    """Otherwise a model that only knows which lines are common would be right too often."""
    common = "return the same"
    lines = [f"value_of_x{n:03} = {n}"[: len(common)] if n % 3 else common for n in range(150)]
    texts = [f"# first\nbegin {n}\n{line}\n# last" for n, line in enumerate(lines)]
    asked = questions(texts, 999)
    true = sum(q.choices[q.answer].strip() == common for q in asked)
    seen = sum(any(choice.strip() == common for choice in q.choices) for q in asked)
    assert (len(asked), true) == (150, 50)
    # each of the other questions draws three times: 1 - (1 - 1/3)^3 of them have it
    assert seen - true == pytest.approx(100 * (1 - (2 / 3) ** 3), abs=15)
