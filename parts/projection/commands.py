"""The command `lockstep project`: bytes, utilisation and hours of each method, in a second."""

import math
import re
from typing import Annotated, Literal

import typer

from lockstep.errors import LockstepError
from pipeline.command_options import RUN_FILES, count

app = typer.Typer()

SECONDS_OF_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MEGABITS = {"kbps": 1e-3, "mbps": 1.0, "gbps": 1e3}  # a second
MOST_QUANTITY = 1e12  # seconds, and megabits a second


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
    from parts.projection.project import PlannedSwarm, lines

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


# ---- Numbers with units: 40e9, 100Mbps, 12h ----


def seconds(flag: str, text: str) -> float:
    """Return a duration of a projected run, as in 90s, 3m, 12h or 2d."""
    return _quantity(flag, text, SECONDS_OF_UNIT, "a duration as 90s, 3m, 12h or 2d")


def mbps(flag: str, text: str) -> float:
    """Return a bandwidth of a projected run, as in 500kbps, 100Mbps or 1Gbps."""
    return _quantity(flag, text, MEGABITS, "a bandwidth as 500kbps, 100Mbps or 1Gbps")


def _quantity(flag: str, text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    try:
        value = float(match[1]) * units[match[2]] if match else math.nan
    except (KeyError, ValueError):
        value = math.nan
    if not 0 < value <= MOST_QUANTITY:
        raise LockstepError(f"{flag} {text}: expected {expected}")
    return value
