"""The command `lockstep project`: bytes, utilisation and hours of each method, in a second."""

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lockstep.errors import LockstepError
from lockstep.machine.progress import size
from pipeline.command_options import RUN_FILES, count

if TYPE_CHECKING:
    from parts.projection.project import PlannedSwarm

app = typer.Typer()

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MEGABITS = {"kbps": 1e-3, "mbps": 1.0, "gbps": 1e3}  # a second
MOST = 1e12  # seconds, and megabits a second
NEVER = 1e6  # hours: a century
ROUTES = {
    "broadcast": "each downloads every other's message",
    "hub": "a hub merges the messages, at no cost, and each downloads what it made",
    "ring": "each sends and receives sums of parts around a ring, of dense messages alone",
}
HEADS = (
    "method",
    "bits per param",
    "local steps",
    "sent a round",
    "received",
    "seconds a round",
    "computes",
    "goodput",
)


@app.command("project", rich_help_panel=RUN_FILES)
def project_run(  # noqa: PLR0913 - each is an option
    peers: Annotated[int, typer.Option(min=2, max=100_000, help="How many.")],
    params: Annotated[float, typer.Option(parser=count, help="Of the model, as 70B.")],
    uplink: Annotated[str, typer.Option(help="Of a peer, as 100Mbps.")],
    downlink: Annotated[
        str | None, typer.Option(help="Of a peer; by default as the uplink.")
    ] = None,
    latency: Annotated[str, typer.Option(help="Of a message, as 0.05s.")] = "0.05s",
    mtbf: Annotated[str, typer.Option(help="Mean time between failures of a peer.")] = "12h",
    restart: Annotated[str, typer.Option(help="Time a peer is away then.")] = "3m",
    quorum: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of the peers for a round.")
    ] = 0.8,
    topology: Annotated[
        Literal["broadcast", "hub", "ring"],
        typer.Option(help="By a hub that merges; all to all; or sums around a ring."),
    ] = "hub",
    batch: Annotated[
        float, typer.Option(parser=count, help="Tokens of a local step, all peers' together.")
    ] = 4e6,
    tokens: Annotated[
        float | None, typer.Option(parser=count, help="Of the run; by default 20 for each param.")
    ] = None,
    flops: Annotated[
        float, typer.Option(parser=count, help="Operations a second that a peer makes of use.")
    ] = 4e14,
) -> None:
    """Say what a large run would take with each method, from its links and failures."""
    from parts.projection.project import PlannedSwarm

    tokens = tokens or 20 * params
    sizes = {"params": (params, 1e15), "batch": (batch, 1e15), "tokens": (tokens, 1e18)}
    for name, (value, most) in (sizes | {"flops": (flops, 1e24)}).items():
        if value > most:
            raise LockstepError(f"--{name} {value:g}: expected a number of at most {most:g}")
    swarm = PlannedSwarm(
        peers=peers,
        params=params,
        batch=batch,
        tokens=tokens,
        flops=flops,
        upload_mbps=mbps("--uplink", uplink),
        download_mbps=mbps("--downlink", downlink or uplink),
        latency_seconds=seconds("--latency", latency),
        mtbf=seconds("--mtbf", mtbf),
        restart=seconds("--restart", restart),
        quorum=quorum,
        topology=topology,
    )
    if batch < peers:
        raise LockstepError(f"--batch {batch:g}: expected at least a token for each of the peers")
    print(*lines(swarm), sep="\n")


def lines(swarm: "PlannedSwarm") -> Iterator[str]:
    """Yield the projection's table in Markdown, and its assumptions."""
    from parts.projection.project import MEASURED, at_least, not_summed, project

    yield f"| {' | '.join((*HEADS, 'hours'))} |"
    yield f"|{'---|' * (len(HEADS) + 1)}"
    for row in project(swarm):
        method = row.method
        cells = [method.label, f"{method.bits:.3g}", str(method.local_steps), size(row.sent)]
        cells += [size(row.received), f"{row.seconds:,.3g}"]
        cells += [f"{100 * share:.3g} %" for share in (row.utilisation, row.goodput)]
        cells.append("never" if row.hours > NEVER else f"{row.hours:,.3g}")
        yield f"| {' | '.join(cells)} |"
    yield ""
    if left := ", ".join(method.label for method in not_summed(swarm)):
        yield f"Not by a ring, since sums of their messages are not messages: {left}."
    enough = at_least(swarm.needed, swarm.peers, swarm.present)
    yield (
        f"Peers are there {swarm.present:.2%} of the time, and {swarm.quorum:.0%} of them at once "
        f"{enough:.2%} of it. Where each failure stops all, {swarm.all_or_nothing:.2%} of the time "
        "trains."
    )
    yield (
        f"Stated: {swarm.tokens:,.3g} tokens, {swarm.batch:,.3g} in a local step; a peer computes "
        f"{swarm.flops:.3g} operations a second, 6 for each param and token, so "
        f"{swarm.tokens_per_second:,.0f} tokens a second; {ROUTES[swarm.topology]}; failures are "
        "independent, and a peer that fails loses its round."
    )
    yield f"Bits of sparse messages: {MEASURED}; of others, by their formats."
    yield (
        "Nothing here was run. Another project measured utilisation 1.08 to 1.92 times worse than "
        "its model (github.com/Adnan082/diloco-measured, read 2026-11-24, DiLoCo at 30.8 M params; "
        "data parallelism far worse than that). Local steps learn less from the same "
        "tokens; by how much, no column says."
    )


# ---- Numbers with units: 40e9, 100Mbps, 12h ----


def seconds(flag: str, text: str) -> float:
    """Return a duration of a projected run, as in 90s, 3m, 12h or 2d."""
    return _quantity(flag, text, SECONDS, "a duration as 90s, 3m, 12h or 2d")


def mbps(flag: str, text: str) -> float:
    """Return a bandwidth of a projected run, as in 500kbps, 100Mbps or 1Gbps."""
    return _quantity(flag, text, MEGABITS, "a bandwidth as 500kbps, 100Mbps or 1Gbps")


def _quantity(flag: str, text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    try:
        value = float(match[1]) * units[match[2]] if match else math.nan
    except (KeyError, ValueError):
        value = math.nan
    if not 0 < value <= MOST:
        raise LockstepError(f"{flag} {text}: expected {expected}")
    return value
