"""The share of time that peers compute, by the bandwidth between them, as papers model it.

A step of T seconds is a forward pass of T / 3 and a backward pass that frees the layers one by one.
After `steps` of them each layer's message goes over one link in turn. The model is ours, made to
agree with the tables of arXiv 2503.09799 and 2501.18512; its bits for each param are a fit.
"""

from collections.abc import Callable
from typing import NamedTuple

GRID = tuple(0.1 * 10 ** (4 * k / 49) for k in range(50))
"""Gbit/s: the bandwidths that the papers' tables have, a factor of 1.207 apart."""
FRAGMENT_LAYERS = 3


class ModelOnLink(NamedTuple):
    """A model that trains: params, layers, seconds of a step, bits of a param on the link."""

    params: float
    layers: int
    step_seconds: float
    bits: float

    @property
    def layer_gigabits(self) -> float:
        """The gigabits of one layer's message."""
        return self.bits * self.params / self.layers / 1e9


def in_turn(model: ModelOnLink, steps: int, gigabits: float) -> float:
    """Return the share of `steps` steps and their message at a bandwidth in Gbit/s.

    CU = H T / max(H T, when the last layer has arrived). Data parallelism is one step.
    """
    whole = steps * model.step_seconds
    backward = 2 * model.step_seconds / 3
    freed, link = whole - backward, 0.0
    for _ in range(model.layers):
        freed += backward / model.layers
        link = max(link, freed) + model.layer_gigabits / gigabits
    return whole / max(link, whole)


def streaming(model: ModelOnLink, steps: int, gigabits: float, *, hidden: float) -> float:
    """Return the same where a fragment of three layers leaves at a time, once in `steps` steps.

    CU = H T / (H T + L / 3 * max(0, c - hidden T)), c the seconds of a fragment's message.

    Args:
      model: The model.
      steps: Steps between two messages of a fragment.
      gigabits: The bandwidth.
      hidden: Steps of training that hide a message: 1 / 3 without overlap, 1.5 with it.
    """
    whole = steps * model.step_seconds
    message = FRAGMENT_LAYERS * model.layer_gigabits / gigabits
    waits = max(0.0, message - hidden * model.step_seconds)
    return whole / (whole + model.layers / FRAGMENT_LAYERS * waits)


def needed(share: Callable[[float], float], target: float) -> int:
    """Return the place in `GRID` of the least bandwidth of that share; its length if none."""
    return next((k for k, gigabits in enumerate(GRID) if share(gigabits) >= target), len(GRID))


def place(gigabits: float) -> int:
    """Return the place in `GRID` of a printed bandwidth."""
    return min(range(len(GRID)), key=lambda k: abs(GRID[k] - gigabits))
