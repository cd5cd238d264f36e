"""What carriers add to the table of `lockstep check`: Ray, and room for the peers in a cluster."""

from collections.abc import Iterator
from pathlib import Path

from parts.carrier.tables import runtime_of
from pipeline import extras
from pipeline.preflight.row import CheckRow, Inspection, Mark, Need
from pipeline.runfile import Run


def _cluster(run: Run, shards: Path | None) -> Iterator[CheckRow]:
    cluster, count = runtime_of(run).ray, run.peers.count
    if runtime_of(run).carrier != "ray" or not extras.is_installed("ray"):
        return
    if not cluster.address:
        yield CheckRow(Mark.UNKNOWN, "Ray", "the training starts a cluster on this host")
        return
    from parts.carrier import ray_actors

    if shortage := ray_actors.shortage_of(count, cluster):
        yield CheckRow(Mark.FAILS, "Ray", f"{shortage}; add hosts, or let a peer reserve less")
    else:
        yield CheckRow(Mark.FINE, "Ray", f"room for {count} peers")


def _extras(run: Run) -> list[str]:
    return ["ray"] * (runtime_of(run).carrier == "ray")


NEEDS = (Need("train", "[runtime] carrier", _extras),)
LOOKS = (Inspection("Ray", "train", _cluster),)
