"""Bytes, utilisation and hours of each method for a planned run, by the clock of `[links]`.

Failures are independent, at one rate in time: a peer works for `mtbf` seconds in the mean, and then
is away for `restart` seconds.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from lockstep.machine.progress import size
from lockstep.protocol.links import Topology, arrivals, traffic

INT4, SIGNS = 4 + 32 / 256, 1 + 32 / 256  # and a float32 for each block of 256
DISTRO = 0.083  # 32 of 4,096 and their signs; more in small matrices
SPARSELOCO = 0.314  # 128 of 4,096 in 2 bits; likewise
SPARTA = 3.2  # a tenth of the params; of SPARTA-DiLoCo a twentieth, and of its outer params
MEASURED = "measured at 1.85 M params, benchmarks/RESULTS.md"
DENSE = 32  # bits for each param of float32
NEVER_HOURS = 1e6  # hours: a century
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


class ProjectedMethod(NamedTuple):
    """A method in a projection, as far as its bytes go."""

    label: str  # what people call it
    bits: float  # bits of a message for each param of the model
    local_steps: int  # between two messages
    # share of the next local steps that hides a message, as in `links.arrivals`
    overlapped: float = 0.0
    sparse: bool = False  # whether the sum of messages has more elements than one of them
    summed: bool = False  # whether that sum is a message, as a ring needs: float32 at equal places


METHODS = (
    ProjectedMethod("AdamW, Muon, SGD: gradients whole", DENSE, 1, summed=True),
    ProjectedMethod("DiLoCo, FedAvg, 100 local steps", DENSE, 100, summed=True),
    ProjectedMethod("DiLoCo, 100 local steps, 4 bits", INT4, 100),
    ProjectedMethod(
        "Streaming DiLoCo, Decoupled DiLoCo, 4 fragments, 4 bits", INT4 / 4, 25, 24 / 25
    ),
    ProjectedMethod("SPARTA, SPARTA-DiLoCo", SPARTA, 1, summed=True),
    ProjectedMethod("SparseLoCo, 10 local steps", SPARSELOCO, 10, sparse=True),
    ProjectedMethod("DiLoCo, 12 local steps, signs", SIGNS, 12),
    ProjectedMethod("DisTrO", DISTRO, 1, sparse=True),
)


class PlannedSwarm(NamedTuple):
    """A planned run to project: its links, as `[links]` has them, and how often its peers fail."""

    peers: int
    params: float  # of the model
    batch: float  # tokens of a local step, all peers' together
    tokens: float  # of the run
    flops: float  # useful floating-point operations a second of a peer
    upload_mbps: float  # of a peer
    download_mbps: float
    latency_seconds: float  # of a message
    mtbf: float  # seconds that a peer works in the mean
    restart: float  # seconds that it is away after a failure
    quorum: float  # least share of the peers for a round
    # who sends to whom: each message to every peer; to a hub, which sends all of them merged;
    # or sums of parts around a ring
    topology: Topology = "broadcast"

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of a peer while it computes: 6 operations for each param and token."""
        return self.flops / (6 * self.params)

    @property
    def present(self) -> float:
        """Share of the time that a planned peer is up: mtbf / (mtbf + restart)."""
        return self.mtbf / (self.mtbf + self.restart)

    @property
    def all_or_nothing(self) -> float:
        """Share of the time that is trained if each failure of a planned peer stops all of them.

        1 / (1 + peers * restart / mtbf): as one machine that fails as often as all together.
        """
        return 1 / (1 + self.peers * self.restart / self.mtbf)

    @property
    def needed(self) -> int:
        """The least number of planned peers for a round."""
        return math.ceil(self.quorum * self.peers - 1e-9)

    def kept_share(self, round_seconds: float) -> float:
        """Return the share of the work of a round that failures leave.

        A peer must be up, with enough others, and not fail before the round is over, since its
        round is lost then: present * P(enough others) * exp(-round / mtbf).
        """
        others = at_least(self.needed - 1, self.peers - 1, self.present)
        return self.present * others * math.exp(-round_seconds / self.mtbf)


class Projected(NamedTuple):
    """The projected figures of one method."""

    method: ProjectedMethod
    sent: float  # bytes of a peer and round
    received: float
    seconds: float  # of a round
    utilisation: float  # share of a round in which peers compute
    goodput: float  # the same of all time, with failures
    hours: float  # of the whole run


def project(swarm: PlannedSwarm) -> Iterator[Projected]:
    """Yield the projected figures of each method, except those `not_summed`.

    Bytes and seconds are those that `train`, `simulate` and `plan` compute, except for a hub of
    messages with different elements: it sends their union, of at most all messages, and at most 4
    bytes for each param. If the messages are quantized, so is the union.
    """
    peers, left_out = range(swarm.peers), not_summed(swarm)
    for method in METHODS:
        if method in left_out:
            continue
        sent = received = message = round(method.bits * swarm.params / 8)
        if method.sparse:
            received = min(message * swarm.peers, round(DENSE * swarm.params / 8))
        tokens = max(1, round(method.local_steps * swarm.batch / swarm.peers))
        of_peers = dict.fromkeys(peers, tokens), dict.fromkeys(peers, message)
        seconds = max(arrivals(swarm, peers, *of_peers, method.overlapped, received).values())
        if swarm.topology != "hub":
            totals = traffic(swarm.topology, [message] * swarm.peers, swarm.peers)
            sent, received = (total / swarm.peers for total in totals)
        utilisation = tokens / swarm.tokens_per_second / seconds
        goodput = utilisation * swarm.kept_share(seconds)
        speed = swarm.peers * swarm.tokens_per_second * goodput
        hours = swarm.tokens / speed / 3600 if speed else float("inf")
        yield Projected(method, sent, received, seconds, utilisation, goodput, hours)


def not_summed(swarm: PlannedSwarm) -> list[ProjectedMethod]:
    """Return the methods that a ring cannot take: the sum of their messages is no message."""
    return [method for method in METHODS if swarm.topology == "ring" and not method.summed]


def at_least(least: int, peers: int, present: float) -> float:
    """Return the projected probability that at least so many of the peers are up at a time.

    sum over k >= least of C(peers, k) present^k (1 - present)^(peers - k).
    """
    if present >= 1:
        return 1.0
    up, down = math.log(present), math.log1p(-present)

    def chance(k: int) -> float:
        """Return the projected probability that exactly k are up."""
        ways = math.lgamma(peers + 1) - math.lgamma(k + 1) - math.lgamma(peers - k + 1)
        return math.exp(ways + k * up + (peers - k) * down)

    return min(1.0, math.fsum(chance(k) for k in range(max(0, least), peers + 1)))


def lines(swarm: PlannedSwarm) -> Iterator[str]:
    """Yield the projection's table in Markdown, and its assumptions."""
    yield f"| {' | '.join((*HEADS, 'hours'))} |"
    yield f"|{'---|' * (len(HEADS) + 1)}"
    for row in project(swarm):
        method = row.method
        cells = [method.label, f"{method.bits:.3g}", str(method.local_steps), size(row.sent)]
        cells += [size(row.received), f"{row.seconds:,.3g}"]
        cells += [f"{100 * share:.3g} %" for share in (row.utilisation, row.goodput)]
        cells.append("never" if row.hours > NEVER_HOURS else f"{row.hours:,.3g}")
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
