"""How these tests want their data."""

from functools import partial
from pathlib import Path

from pipeline.runfile.data import Limit
from pipeline.runfile.network import Network
from pipeline.sources import FetchOptions
from pipeline.stage.progress import Progress


def options(store: Path, limit: Limit | None = None, *, stream: bool = False) -> FetchOptions:
    """Options of a run that gives up soon."""
    network = Network(connections=4, attempts=2, stall_seconds=5)
    return FetchOptions(store, limit, stream, network, partial(Progress, "download"))
