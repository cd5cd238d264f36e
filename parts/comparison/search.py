"""The search that every method gets: one key after the other, until the best is bracketed.

A point is by how many doublings each key differs from the method's start. The best is bracketed in
a key where its double and its half, all else equal, were tried and are not better. The search
brackets the first key, the rate, then the next; where a later one moved the best, it goes round
again. It ends when the best is bracketed in every key, or when the trainings are used up. Keys
whose values are near 1, as momenta, double by what they lack to it. So no range limits the values.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Point = tuple[float, ...]
RATE = "rate"
NEAR_1 = ("momentum", "decay", "feedback", "mixing")  # how keys end whose values are, and below it
BELOW_1 = ("share", "keep", "shrink_most")  # ... whose values are anywhere there


class Found(NamedTuple):
    """What a search found, or what was stated in its place."""

    values: Mapping[str, float]  # the best, of all keys
    tuned: Sequence[str] = ()  # the keys of which more than the start was tried
    edges: Sequence[str] = ()  # those of them in which the best is not bracketed
    tried: Sequence[Mapping[str, Any]] = ()  # values, loss, and whether it is the best, in order


def limit(key: str) -> float:
    """Return what a searched key's values stay below: 1, or infinity."""
    has_limit = key.endswith(NEAR_1 + BELOW_1) and not key.endswith("weight_decay")
    return 1.0 if has_limit else math.inf


def value(key: str, start: float, doublings: float) -> float:
    """Return a searched key's value, `doublings` doublings from its start."""
    factor = 2.0**doublings
    lacks = limit(key) == 1.0 and key.endswith(NEAR_1)  # what it lacks to 1 is what doubles
    result = 1.0 - (1.0 - start) / factor if lacks else start * factor
    return float(f"{result:.6g}")


def values(start: Mapping[str, float], point: Point) -> dict[str, float]:
    """Return the values of all searched keys at a point."""
    return {key: value(key, start[key], by) for key, by in zip(start, point, strict=True)}


def next_point(start: Mapping[str, float], tried: Mapping[Point, float | None]) -> Point | None:
    """Return the search's next point after those tried, with losses; None: the best is bracketed.

    The loss of a training that diverged is None.
    """
    if not tried:
        return (0.0,) * len(start)
    keys, (*before, last) = range(len(start)), tried
    at = 0  # the key that is being bracketed: that of the last step
    if before:
        left = best_point({point: tried[point] for point in before})
        at = next(number for number in keys if last[number] != left[number])
    in_turn = (*keys[at:], *keys[:at])
    return next((p for number in in_turn for p in _untried(start, tried, number)), None)


def found(start: Mapping[str, float], tried: Mapping[Point, float | None]) -> Found:
    """Return what a search found by the points it tried, with their losses."""
    if not tried:
        return Found(start)
    best, keys = best_point(tried), list(enumerate(start))
    tuned = [key for n, key in keys if len({point[n] for point in tried}) > 1]
    edges = [key for n, key in keys if key in tuned and _untried(start, tried, n)]
    lines = [
        {**values(start, point), "loss": loss, "best": point == best}
        for point, loss in tried.items()
    ]
    return Found(values(start, best), tuned, edges, lines)


def best_point(tried: Mapping[Point, float | None]) -> Point:
    """Return the searched point of the lowest loss, the first of equals."""
    losses = {point: math.inf if loss is None else loss for point, loss in tried.items()}
    return min(losses, key=losses.__getitem__)


def searched(
    start: Mapping[str, float], losses: Sequence[float | None]
) -> dict[Point, float | None]:
    """Return the points of a search that have been trained, in order, and their losses."""
    tried: dict[Point, float | None] = {}
    for loss in losses:
        if (point := next_point(start, tried)) is None:  # no more were needed
            break
        tried[point] = loss
    return tried


def _untried(
    start: Mapping[str, float], tried: Mapping[Point, float | None], number: int
) -> list[Point]:
    """Return the best's neighbours along a key that were not tried, where its value may be."""
    best, key = best_point(tried), [*start][number]
    around = [(*best[:number], best[number] + by, *best[number + 1 :]) for by in (1.0, -1.0)]
    free = [point for point in around if point not in tried]
    return [p for p in free if 0.0 < value(key, start[key], p[number]) < limit(key)]
