"""What carriers add to the table of `lockstep check`: Ray, and room for the peers in a cluster."""

from collections.abc import Iterator
from pathlib import Path

from pipeline import extras
from pipeline.preflight.row import CheckRow, Inspection, Mark, Need
from pipeline.runfile import Run


def _cluster(run: Run, shards: Path | None) -> Iterator[CheckRow]:
    cluster, count = run.runtime.ray, run.peers.count
    if run.runtime.carrier != "ray" or not extras.is_installed("ray"):
        return
    if not cluster.address:
        yield CheckRow(Mark.UNKNOWN, "Ray", "the training starts a cluster on this host")
        return
    from parts.carrier import ray_actors

    if shortage := ray_actors.shortage_of(count, cluster):
        yield CheckRow(Mark.FAILS, "Ray", f"{shortage}; add hosts, or let a peer reserve less")
    else:
        yield CheckRow(Mark.FINE, "Ray", f"room for {count} peers")


NEEDS = (Need("train", "[runtime] carrier", lambda run: ["ray"] * (run.runtime.carrier == "ray")),)
LOOKS = (Inspection("Ray", "train", _cluster),)
