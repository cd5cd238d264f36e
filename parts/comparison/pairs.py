"""Differences between rows on equal seeds, with intervals that hold for all pairs together."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LEVEL = 0.95


class Difference(NamedTuple):
    """How much higher the loss of one row is than another's, on equal seeds, nats per token."""

    better: str  # a method, as it stands in the file; with a failure "method, failure"
    worse: str
    mean: float
    reach: float | None  # half of the interval; None for one seed

    @property
    def sure(self) -> bool:
        """Whether there is an interval, and it does not contain 0."""
        return self.reach is not None and abs(self.mean) > self.reach

    def __str__(self) -> str:
        if self.reach is None:
            return f"{self.mean:.3f}"
        return f"{self.mean:.3f} [{self.mean - self.reach:.3f}, {self.mean + self.reach:.3f}]"


def differences(
    losses: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str, str]] | None = None
) -> list[Difference]:
    """Return the differences of pairs of rows, or of each two, from losses in the order of seeds.

    Seeds are paired: each draws one set of weights, data and rows for all. The interval is
    Student's t at 1 - (1 - 0.95) / pairs, by Bonferroni: however pairs hang together, all intervals
    hold at once in 95 of 100 comparisons.
    """
    from scipy import stats

    if pairs is None:
        pairs = list(itertools.combinations(losses, 2))
    result = []
    for better, worse in pairs:
        gaps = [b - a for a, b in zip(losses[better], losses[worse], strict=True)]
        reach = None
        if len(gaps) > 1:
            quantile = stats.t.ppf(1 - (1 - LEVEL) / (2 * len(pairs)), len(gaps) - 1)
            reach = float(quantile) * statistics.stdev(gaps) / math.sqrt(len(gaps))
        result.append(Difference(better, worse, statistics.fmean(gaps), reach))
    return result
