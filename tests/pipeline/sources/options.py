"""How these tests want their data, and the error if they cannot have it."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lockstep.machine.progress import Progress
from pipeline import sources
from pipeline.runfile import Network
from pipeline.runfile.data import Data, Limit
from pipeline.sources.provider import Fetched, FetchOptions
from tests.errors import refused


def options(store: Path, limit: Limit | None = None, *, stream: bool = False) -> FetchOptions:
    """Options of a run that gives up soon."""
    network = Network(connections=4, attempts=2, stall_seconds=5)
    return FetchOptions(store, limit, stream, network, partial(Progress, "download"))


def fetch_into(folder: Path, location: Data, limit: Limit | None = None, **how: bool) -> Fetched:
    """Fetch what a location has into a new folder, with a store beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    return sources.fetch(location, folder, options(folder.parent / "store", limit, **how))


def refusal(call: Callable, *arguments: object, **fields: object) -> str:
    """Return the one line that a call ends with."""
    with refused() as caught:
        call(*arguments, **fields)
    return str(caught.value)
