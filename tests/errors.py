"""How a test checks an error: it is one line, and names the key (or file) and the value.

    with refused("config.total_steps", 0):
        runfile.load(path)

The wording is free: who writes a better sentence has no test to change. What a test names must
stand in the line as a whole word, so that 1 is not in "10" nor `peers.count` in `peers.counted`.
Name what a user looks for: where it is wrong, what was found, and a bound where it is the point.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.errors import LockstepError


def check_names(error: BaseException | str, *named: object) -> None:
    """Check that an error, or what a command printed of it, is one line with these words in it."""
    line = str(error).rstrip("\n")
    assert "\n" not in line, f"{line!r} has several lines"
    for one in named:
        assert is_named(one, line), f"{line!r} does not name {one!r}"


def is_named(one: object, line: str) -> bool:
    """Return whether a text stands in a line as a whole word; True and False as TOML has them."""
    text = str(one).lower() if isinstance(one, bool) else str(one)
    before = r"(?<!\w)" if text[:1].isalnum() else ""
    after = r"(?!\w)" if text[-1:].isalnum() else ""
    return re.search(before + re.escape(text) + after, line) is not None


@contextmanager
def refused(
    *named: object, error: type[Exception] = LockstepError
) -> Iterator[pytest.ExceptionInfo]:
    """Expect an error that names these."""
    with pytest.raises(error) as caught:
        yield caught
    check_names(caught.value, *named)
