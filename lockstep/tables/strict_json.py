"""JSON of which everybody reads the same: a key stands once in a table, a number is finite.

Python takes the last of two equal keys, other readers the first, so a stranger's file could say two
things at once; and it reads NaN and infinity, which JSON does not have.
"""

import json
import math
from typing import Any

from lockstep.errors import brief


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: It is no JSON, a key stands twice in a table, or a number is not finite.
      RecursionError: Its lists are thousands deep in one another.
    """
    return json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=once)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of JSON whose keys stand once; an `object_pairs_hook`.

    Raises:
      ValueError: A key stands twice.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {brief(repr(twice))} stands twice in a table")
    return table


def _finite(number: str) -> float:
    """Return a number of JSON, which has neither NaN nor infinity; Python reads and writes both."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value
