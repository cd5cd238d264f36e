"""What a provider is asked with in these tests."""

from functools import partial
from pathlib import Path

from pipeline.runfile.data import Limit
from pipeline.runfile.network import Network
from pipeline.sources import Wanted
from pipeline.stage.progress import Progress


def wanted(store: Path, limit: Limit | None = None, *, stream: bool = False) -> Wanted:
    """As a run wants it that is in haste."""
    network = Network(connections=4, attempts=2, stall_seconds=5)
    return Wanted(store, limit, stream, network, partial(Progress, "download"))
