"""What strangers wrote costs time in proportion to its size, whatever it says.

At these sizes what grows with the square takes minutes, and what is linear well under a second.
"""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product

import pytest

from lockstep import errors
from lockstep.errors import LockstepError
from pipeline.net import errors as net_errors
from pipeline.pages import templates
from pipeline.stage.keys import PROJECT
from tests.linear import WORST, in_time

SHOWING = {
    "hide": errors.hide,
    "brief": errors.brief,
    "LockstepError": lambda text: str(LockstepError(text)),
    "shown": errors.shown,
    "reveals": errors.reveals,
    "redact": lambda text: net_errors.message(ValueError(text)),
    "public": templates.without_secrets,
    "folders": templates.without_folders,
    "code": templates.code,
}
BOUNDED = ("brief", "LockstepError")
FUNCTIONS = {
    f"re.{name}" for name in ("compile", "fullmatch", "match", "search", "sub", "findall", "split")
}
WINGS = ("lockstep", "parts", "pipeline")
NOT_WRITTEN_HERE = {
    "pipeline/recheck/outputs.py: self.names",  # of the table above it
    "pipeline/recheck/outputs.py: output.names",
    "lockstep/errors.py: '|'.join(map(re.escape, longest)) or '(?!)'",
    "pipeline/weights/hf.py: model.ignored",
    "pipeline/tokens/signs.py: f'(?<![a-z]){split}(?![a-z])'",  # of a word of ours
}


@pytest.mark.parametrize("name", SHOWING)
def test_what_shows_a_strangers_words_takes_time_in_proportion_to_them(monkeypatch, name):
    monkeypatch.setattr(errors, "_secrets", {"hf_secret"})
    size = 10**7 if name in BOUNDED else 3 * 10**5
    with in_time():
        for text in WORST:
            SHOWING[name](text * (size // len(text)))


def patterns() -> Iterator[tuple[str, str, set[str]]]:
    """Every pattern that the source compiles: where and how it is written, itself, and its use."""
    for path in sorted(path for wing in WINGS for path in (PROJECT / wing).rglob("*.py")):
        name, source = path.relative_to(PROJECT), path.read_text()
        used = set(re.findall(r"(?<!\bre)\.(fullmatch|match|search|sub)\b", source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in FUNCTIONS:
                written, function = ast.unparse(node.args[0]), ast.unparse(node.func)[3:]
                if f"{name}: {written}" not in NOT_WRITTEN_HERE:
                    module = import_module(".".join(name.with_suffix("").parts))
                    found = eval(written, dict(vars(module)))
                    pattern = found if isinstance(found, str) else found.decode()
                    yield (
                        f"{name}: {written}",
                        pattern,
                        used if function == "compile" else {function},
                    )


# What in a pattern stands between its literal texts.
BETWEEN = re.compile(r"\\.|\(\?<?[:!=]|\(\?P<\w+>|[][(){}|*+?^$]")


@pytest.mark.long
def test_no_pattern_takes_more_than_time_in_proportion_to_what_it_reads():
    for where, pattern, functions in patterns():
        print(where)  # the last that is shown took too long
        with in_time():
            check_pattern(pattern, functions)


def check_pattern(pattern: str, functions: set[str]) -> None:
    literals = [text for text in BETWEEN.split(pattern) if text]
    matchers = [getattr(re.compile(pattern), name) for name in functions & {"fullmatch", "match"}]
    if functions - {"fullmatch", "match"}:
        matchers.append(re.compile(pattern).search)
    for one, other in product(("", "a", "0"), (*literals, " ", "\t", "a", ".", "/")):
        text = (one + other) * (10**5 // len(one + other))
        for start, matcher in product(("", *literals[:1]), matchers):
            matcher(start + text)
