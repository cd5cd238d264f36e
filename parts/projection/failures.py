"""The cost of failures: how many peers are up, how often enough are, and what one stops.

Failures are independent, at one rate in time: a peer works for `mtbf` seconds in the mean, and then
is away for `restart` seconds.
"""

import math


def available(mtbf: float, restart: float) -> float:
    """Return the share of time that a peer is there: mtbf / (mtbf + restart)."""
    return mtbf / (mtbf + restart)


def quorum(peers: int, share: float, present: float) -> float:
    """Return the probability that at least `share` of the peers are there at a time."""
    return at_least(math.ceil(share * peers - 1e-9), peers, present)


def at_least(least: int, peers: int, present: float) -> float:
    """Return the probability that at least so many of the peers are there at a time.

    sum over k >= least of C(peers, k) present^k (1 - present)^(peers - k).
    """
    if present >= 1:
        return 1.0
    up, down = math.log(present), math.log1p(-present)

    def of(k: int) -> float:
        ways = math.lgamma(peers + 1) - math.lgamma(k + 1) - math.lgamma(peers - k + 1)
        return math.exp(ways + k * up + (peers - k) * down)

    return min(1.0, math.fsum(of(k) for k in range(max(0, least), peers + 1)))


def all_or_nothing(peers: int, mtbf: float, restart: float) -> float:
    """Return the share of time that trains, where each failure of a peer stops all of them.

    1 / (1 + peers * restart / mtbf): as one machine that fails as often as all of them together.
    """
    return 1 / (1 + peers * restart / mtbf)
