"""The search that every method gets: so many trainings, each where the ones before it point.

A point is by how many doublings each key differs from the method's start. The next one lies a step
from the best so far, along the first key and side where nobody has been: a doubling, and when all
of these are taken half of one, and so on. Keys whose values are near 1, as momenta, double by what
they lack to it. So no range limits the values, and a method with more keys has no more trainings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

Point = tuple[float, ...]
RATE = "rate"
FINEST = 20  # halvings of a step
NEAR_1 = ("momentum", "decay", "feedback", "mixing")  # how keys end whose values are, and below it
BELOW_1 = ("share", "keep", "shrink_most")  # ... whose values are anywhere there


def limit(key: str) -> float:
    """Return what a key's values stay below: 1, or infinity."""
    has_limit = key.endswith(NEAR_1 + BELOW_1) and not key.endswith("weight_decay")
    return 1.0 if has_limit else math.inf


def value(key: str, start: float, doublings: float) -> float:
    """Return a key's value, `doublings` doublings from its start."""
    factor = 2.0**doublings
    lacks = limit(key) == 1.0 and key.endswith(NEAR_1)  # what it lacks to 1 is what doubles
    result = 1.0 - (1.0 - start) / factor if lacks else start * factor
    return float(f"{result:.6g}")


def values(start: Mapping[str, float], point: Point) -> dict[str, float]:
    """Return the values of all keys at a point."""
    return {key: value(key, start[key], by) for key, by in zip(start, point, strict=True)}


def next_point(start: Mapping[str, float], tried: Mapping[Point, float | None]) -> Point:
    """Return the point after those tried, with their losses; None: the training diverged."""
    if not tried:
        return (0.0,) * len(start)
    best = best_point(tried)
    return next(
        point
        for point in _around(best)
        if point not in tried
        and all(0.0 < value < limit(key) for key, value in values(start, point).items())
    )


def best_point(tried: Mapping[Point, float | None]) -> Point:
    """Return the point of the lowest loss, the first of equals."""
    losses = {point: math.inf if loss is None else loss for point, loss in tried.items()}
    return min(losses, key=losses.__getitem__)


def searched(
    start: Mapping[str, float], losses: Sequence[float | None]
) -> dict[Point, float | None]:
    """Return the points of a search that have been trained, in order, and their losses."""
    tried: dict[Point, float | None] = {}
    for loss in losses:
        tried[next_point(start, tried)] = loss
    return tried


def _around(point: Point) -> Iterator[Point]:
    for halvings in range(FINEST):
        for number in range(len(point)):
            for step in (0.5**halvings, -(0.5**halvings)):
                yield (*point[:number], point[number] + step, *point[number + 1 :])
