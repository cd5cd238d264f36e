"""The task next_line: which of four lines follows these lines of held-out text?

It needs no download: the questions are made of the run's own held-out split, which in the default
run is source code. The true next line stands among three lines of like length from other documents
of the split, with its own indentation, so neither length nor indentation tells which it is. All
draws are by SHA-256 of the seed and the text: equal text gives equal questions wherever they are
made, and their hash says which they are.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

NAME = "next_line"
CHOICES = 4
CONTEXT_BYTES = 256  # of the lines before the one that is asked for
SHORTEST_LINE, LONGEST_LINE = 12, 120  # bytes of that line, without its indentation
NEAR = 64  # the other choices are drawn from so many lines, the next shorter and the next longer
CUT = "\ufffd"  # what a decoder writes for a part of a character


class Question(NamedTuple):
    """A question of the next line: lines of a text, and four that may come next.

    The break before the line belongs to the choices: what ends in white space is cut into other
    tokens than the whole text. Questions of one document are alike.
    """

    context: str
    choices: tuple[str, ...]
    answer: int
    document: int


class _Line(NamedTuple):
    """A line that can be a question: its place, indentation and text, and the lines before it."""

    document: int
    indentation: str
    text: str
    context: str


def questions(texts: Iterable[str], seed: int = 0) -> Iterator[Question]:
    """Yield all questions of the next line of some documents, in an order that is drawn.

    A line can be asked for if it is neither very short nor very long, and the line before it is not
    blank. The other choices are such lines of other documents, distinct from it, from each other
    and from the lines before it.
    """
    candidates = (line for number, text in enumerate(texts) for line in _lines(number, text))
    lines = {_draw(seed, line.context, line.indentation, line.text): line for line in candidates}
    # a frequent line is often the answer, so it is as often another choice
    pool = sorted((len(line.text.encode()), name) for name, line in lines.items())
    for name, line in sorted(lines.items()):
        place = bisect_left(pool, (len(line.text.encode()), name))
        near = [other for _, other in pool[max(0, place - NEAR) : place + NEAR]]
        others = sorted(near, key=lambda other: _draw(seed, name, other))  # noqa: B023 - used at once
        if question := _question(line, [lines[other] for other in others], int(name, 16)):
            yield question


def _lines(document: int, text: str) -> Iterator[_Line]:
    """The lines that can be next-line questions, without those at a part's ends, maybe cut."""
    lines = text.split("\n")[1:-1]
    for number, line in enumerate(lines[1:], start=1):
        words = line.strip()
        if SHORTEST_LINE <= len(words.encode()) <= LONGEST_LINE and CUT not in line:
            context = _context(lines[:number])
            if context:
                yield _Line(document, line[: line.index(words)], words, context)


def _context(lines: list[str]) -> str:
    """The last lines before a question, that fit into `CONTEXT_BYTES`; none if they end blank."""
    if not lines[-1] or lines[-1][-1].isspace():
        return ""
    tail: list[str] = []
    size = -1
    for line in reversed(lines):
        size += 1 + len(line.encode())
        if size > CONTEXT_BYTES or CUT in line:
            break
        tail.insert(0, line)
    return "\n".join(tail).lstrip("\n")


def _question(line: _Line, others: list[_Line], draw: int) -> Question | None:
    """A line's question with the first others that can be the next line; None if too few."""
    # lines of its own document come last: they serve only where other documents have too few
    others = sorted(others, key=lambda other: other.document == line.document)
    used = {line.text, *(before.strip() for before in line.context.split("\n"))}
    choices: list[str] = []
    for other in others:
        if other.text not in used and len(choices) < CHOICES - 1:
            used.add(other.text)
            choices.append(other.text)
    if len(choices) < CHOICES - 1:
        return None
    answer = draw % CHOICES
    choices.insert(answer, line.text)
    texts = tuple(f"\n{line.indentation}{choice}" for choice in choices)
    return Question(line.context, texts, answer, line.document)


def _draw(seed: int, *texts: str) -> str:
    return hashlib.sha256(json.dumps([seed, *texts]).encode()).hexdigest()
