"""The aggregates that a run file can name, `[peers] aggregation`."""

from collections.abc import Callable

from lockstep.optim.aggregation.aggregate import AggregateFn, mean
from lockstep.optim.aggregation.by_element import median, min_support, peer_mean, trimmed_mean
from lockstep.optim.aggregation.by_peer import (
    centered_clip,
    multi_krum,
    norm_clip,
    rda,
    rda_median_norm,
)


def _whatever(aggregate: AggregateFn) -> Callable[[int], AggregateFn]:
    """Return what makes an aggregate that needs no number of liars."""
    return lambda liars: aggregate


RULES: dict[str, Callable[[int], AggregateFn]] = {
    "mean": _whatever(mean),
    "peer_mean": _whatever(peer_mean),
    "median": _whatever(median),
    "trimmed_mean": trimmed_mean,
    "min_support": min_support,
    "norm_clip": _whatever(norm_clip),
    "centered_clip": _whatever(centered_clip),
    "multi_krum": multi_krum,
    "rda": _whatever(rda),
    "rda_median_norm": _whatever(rda_median_norm),
}
"""By its name, what makes a rule from the number of liars that are assumed."""
