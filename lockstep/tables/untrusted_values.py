"""Numbers, shapes and names that another process says: by their types, and by their ranges."""

import math
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from lockstep.tables.table import AsTuple, wrong

LARGEST = float(np.finfo(np.float32).max)
ELEMENTS = 2**48  # the most in an array, zeros in its shape not counted

SaidNumber = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
"""A finite number that float32 holds."""
Metrics = dict[str, bool | int | float | str]
"""Plain values by name."""
SaidPath = Annotated[str, Field(pattern=r"^[^\x00]+$", max_length=4096)]
"""A path, which is not looked at."""


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(max(1, size) for size in shape) > ELEMENTS:  # NumPy refuses it, even if empty
        raise wrong((), f"at most {ELEMENTS} elements")
    return shape


Shape = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=16), AfterValidator(_bounded), AsTuple
]
"""The shape of an array."""


def _as_array(value: Any) -> np.ndarray:
    leaves = np.array(value, object).reshape(-1)
    if not all(type(leaf) in (int, float) and abs(leaf) <= LARGEST for leaf in leaves):
        raise wrong((), "numbers that float32 holds, in lists of one length")
    return np.array(value, np.float32)


SaidNumbers = Annotated[Any, AfterValidator(_as_array)]
"""Numbers, or lists of them, as an array of float32."""
