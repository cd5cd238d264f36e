"""What the library knows of `[peers]`: how many, how they run, how messages are merged."""

from typing import Annotated, Literal, Protocol

from pydantic import Field

MAX_CLIENTS = 256  # Psyche's bound
PeerCount = Annotated[int, Field(ge=1, le=MAX_CLIENTS)]
Liars = Annotated[int, Field(ge=1, lt=MAX_CLIENTS)]
PeerLayout = Literal["each", "shard_map", "vmap", "pmap"]
SimulatedLayout = Literal[PeerLayout, "rounds"]
Bits = Literal["machine", "everywhere"]
ProductBits = Literal[20, 8]
Aggregation = Literal[
    "mean",
    "peer_mean",
    "median",
    "trimmed_mean",
    "min_support",
    "norm_clip",
    "centered_clip",
    "multi_krum",
    "rda",
    "rda_median_norm",
]


class PeersTable(Protocol):
    """The keys of `[peers]` that decide which faults a run can have."""

    count: int
    layout: PeerLayout
    bits: Bits
    attention: Literal["matmul", "cudnn"]
    wire: Literal["lockstep", "psyche"]
