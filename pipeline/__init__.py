"""The stages of a Lockstep run and their library. Every Snakemake job imports this: stay light."""

from importlib import import_module
from typing import Any

__version__ = "0.3.0.dev0"


def __getattr__(name: str) -> Any:
    """Return `simulate`, which needs JAX, once it is asked for; no stage does."""
    if name != "simulate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.simulation.simulate").simulate
