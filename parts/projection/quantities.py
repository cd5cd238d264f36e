"""Numbers with units on a command line: 40e9, 100Mbps, 12h."""

import math
import re

from lockstep.errors import LockstepError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BITS_PER_SECOND = {"kbps": 1e3, "mbps": 1e6, "gbps": 1e9}


def seconds(flag: str, text: str) -> float:
    """Return a duration, as in 90s, 3m, 12h or 2d.

    Raises:
      LockstepError: The text is no such quantity, or is not positive.
    """
    return _quantity(flag, text, SECONDS, "a duration as 90s, 3m, 12h or 2d")


def bits_per_second(flag: str, text: str) -> float:
    """Return a bandwidth, as in 500kbps, 100Mbps or 1Gbps.

    Raises:
      LockstepError: The text is no such quantity, or is not positive.
    """
    return _quantity(flag, text, BITS_PER_SECOND, "a bandwidth as 500kbps, 100Mbps or 1Gbps")


def amount(flag: str, value: float, most: float) -> float:
    """Return a number of things, which is below all that `most` could stand for.

    Raises:
      LockstepError: It is larger, or no number.
    """
    if not value <= most:  # NaN is not either
        raise LockstepError(f"{flag} {value:g}: expected a number of at most {most:g}")
    return value


def _quantity(flag: str, text: str, units: dict[str, float], expected: str) -> float:
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    try:
        value = float(found[1]) * units[found[2]] if found else math.nan
    except (KeyError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise LockstepError(f"{flag} {text}: expected {expected}")
    return value
