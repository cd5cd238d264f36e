"""The stages of a Lockstep run and what they need. Every Snakemake job imports this: stay light.

The names are what the room `net`, which imports nothing of Lockstep, takes of its package.
Budget: 23,118 lines of Python.
"""

from lockstep import __version__
from lockstep.errors import LockstepError as NetError
from lockstep.errors import RequestError as BadRequestError
from lockstep.errors import brief, hide, keep_secret, reveals
from pipeline.extras import lacking

AGENT = f"lockstep/{__version__}"
__all__ = [
    "AGENT",
    "BadRequestError",
    "NetError",
    "brief",
    "hide",
    "keep_secret",
    "lacking",
    "reveals",
]
