"""Bytes, utilisation and hours of each method for a planned run, by the clock of `[links]`."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from pipeline.projection import failures
from pipeline.protocol.links import arrivals

Topology = Literal["broadcast", "hub", "ring"]
MEASURED = "measured at 1.85 M params, benchmarks/RESULTS.md"


DENSE = 32  # bits for each param of float32


class ProjectedMethod(NamedTuple):
    """A method, as far as its bytes go.

    Attributes:
      label: What people call it.
      bits: Bits of a message for each param of the model.
      local_steps: Between two messages.
      overlapped: Share of the next local steps that hides a message, as in `links.arrivals`.
      sparse: Whether the sum of messages has more elements than one of them.
    """

    label: str
    bits: float
    local_steps: int
    overlapped: float = 0.0
    sparse: bool = False


METHODS = (
    ProjectedMethod("AdamW, gradients whole", 32, 1),
    ProjectedMethod("DiLoCo, 100 local steps", 32, 100),
    ProjectedMethod("DiLoCo, 100 local steps, 4 bits", 4.1, 100),
    ProjectedMethod("Streaming DiLoCo, 4 fragments, 4 bits", 4.1 / 4, 25, 1.0),
    ProjectedMethod("SparseLoCo, 10 local steps", 0.314, 10, sparse=True),
    ProjectedMethod("DiLoCo, 12 local steps, signs", 1.125, 12),
    ProjectedMethod("DisTrO, AdaDistro", 0.083, 1, sparse=True),
)


class PlannedSwarm(NamedTuple):
    """A planned run: bits a second, seconds, tokens.

    Attributes:
      peers: How many.
      params: Of the model.
      batch: Tokens of a local step, all peers' together.
      tokens: Of the run.
      flops: Useful floating-point operations a second of a peer.
      uplink, downlink: Bits per second of a peer.
      latency: Seconds of a message.
      mtbf, restart: Seconds that a peer works in the mean, and that it is away after a failure.
      quorum: Least share of the peers for a round.
      topology: Who sends to whom: each message to every peer; to a hub, which sends all of them
        merged; or sums of parts around a ring.
    """

    peers: int
    params: float
    batch: float
    tokens: float
    flops: float
    uplink: float
    downlink: float
    latency: float
    mtbf: float
    restart: float
    quorum: float
    topology: Topology = "broadcast"

    @property
    def tokens_per_second(self) -> float:
        """Of a peer, while it computes: 6 operations for each param and token."""
        return self.flops / (6 * self.params)

    @property
    def failing(self) -> float:
        """Share of the work that failures leave: of peers that are there, of rounds with enough."""
        present = failures.available(self.mtbf, self.restart)
        return present * failures.quorum(self.peers, self.quorum, present)


class _Links(NamedTuple):
    tokens_per_second: float
    latency_seconds: float
    upload_mbps: float
    download_mbps: float


class Projected(NamedTuple):
    """What a method comes to.

    Attributes:
      method: The method.
      sent, received: Bytes of a peer and round.
      utilisation: Share of a round in which peers compute.
      goodput: The same of all time, with failures.
      hours: Of the whole run.
    """

    method: ProjectedMethod
    sent: float
    received: float
    utilisation: float
    goodput: float
    hours: float


def project(swarm: PlannedSwarm) -> Iterator[Projected]:
    """Yield what each method comes to; without those that a ring cannot sum."""
    for method in METHODS:
        if swarm.topology == "ring" and method.bits < DENSE:
            continue  # a sum of quantized or sparse messages is not one
        sent, received = sizes(swarm, method)
        tokens = max(1, round(method.local_steps * swarm.batch / swarm.peers))
        utilisation = tokens / swarm.tokens_per_second / _seconds(swarm, method, tokens)
        goodput = utilisation * swarm.failing
        speed = swarm.peers * swarm.tokens_per_second * goodput
        hours = swarm.tokens / speed / 3600 if speed else float("inf")
        yield Projected(method, sent, received, utilisation, goodput, hours)


def sizes(swarm: PlannedSwarm, method: ProjectedMethod) -> tuple[float, float]:
    """Return the bytes that a peer sends and receives in a round.

    A hub sends one message where they have the same elements, quantized again as they are; else
    their union, of at most all messages, and at most 4 bytes for each param. A ring's sums are
    2 (1 - 1 / peers) messages.
    """
    message = round(method.bits * swarm.params / 8)
    if swarm.topology == "broadcast":
        return message, message * (swarm.peers - 1)
    if swarm.topology == "ring":
        both = 2 * (1 - 1 / swarm.peers) * message
        return both, both
    union = min(message * swarm.peers, DENSE * swarm.params / 8)
    return message, union if method.sparse else message


def _seconds(swarm: PlannedSwarm, method: ProjectedMethod, tokens: int) -> float:
    """Of a round; broadcast as `train`, `simulate` and `plan` have it, by `links.arrivals`."""
    peers, speed = range(swarm.peers), swarm.tokens_per_second
    sent, received = sizes(swarm, method)
    if swarm.topology == "broadcast":
        links = _Links(speed, swarm.latency, swarm.uplink / 1e6, swarm.downlink / 1e6)
        of_peers = dict.fromkeys(peers, tokens), dict.fromkeys(peers, round(sent))
        return max(arrivals(links, peers, *of_peers, method.overlapped).values())
    if swarm.topology == "ring":
        hops = 2 * (swarm.peers - 1) * swarm.latency
        exchange = hops + 8 * sent / min(swarm.uplink, swarm.downlink)
    else:
        exchange = 2 * swarm.latency + 8 * sent / swarm.uplink + 8 * received / swarm.downlink
    trained = tokens / speed
    return max(trained, (1 - method.overlapped) * trained + exchange)
