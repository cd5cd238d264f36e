"""Lockstep's own tables of a run file: peers, links, faults, the audit and the rest."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from pipeline.runfile.fault_kinds import KINDS
from pipeline.runfile.network import Network
from pipeline.runfile.psyche import MAX_CLIENTS
from pipeline.runfile.table import U32, AsTuple, Table, wrong

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Percent = Annotated[float, Field(ge=0, le=100)]
Pin = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]

FaultKind = Literal[tuple(KINDS)]
PeerNumber = Annotated[int, Field(ge=0)]


def _distinct(peers: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(peers)) < len(peers):
        raise wrong((), "each peer once")
    return peers


SomePeers = Annotated[
    tuple[PeerNumber, ...], Field(min_length=1), AfterValidator(_distinct), AsTuple
]


def _either(number: Any, numbers: Any) -> Any:
    """The type of a number or of a list, told apart so that an error is about one of them."""
    return Annotated[
        Annotated[number, Tag("number")] | Annotated[numbers, Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number"),
    ]


def _per_peer(number: Any) -> Any:
    """The type of one number for all peers, or a list with one number per peer."""
    return _either(number, Annotated[tuple[number, ...], AsTuple])


def _layout(name: Any) -> Any:
    return "shard_map" if name == "pmap" else name  # JAX builds pmap on shard_map


Layout = Annotated[
    Literal["each", "shard_map", "vmap"],
    BeforeValidator(_layout, json_schema_input_type=Literal["each", "shard_map", "vmap", "pmap"]),
]


class Peers(Table):
    """Who trains, and how each peer computes."""

    count: Annotated[int, Field(ge=1, le=MAX_CLIENTS)]
    """Peers that take part, 1 to 256; at least config.init_min_clients."""
    layout: Layout = "each"
    """How peers run on devices: each (one program per peer, which a witness replays bit for bit),
    shard_map (one program over all devices; pmap is an alias) or vmap (one program, one device)."""
    micro_batch: Count = 4
    """Sequences that a peer computes gradients of at once."""
    fsdp: Count = 1
    """Devices that hold one peer's params and state in parts and share its micro-batches, where one
    device is too small; micro_batch is a multiple of it."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the model's arithmetic; params and optimizer stay float32."""
    attention: Literal["matmul", "cudnn"] = "matmul"
    """How attention is computed: plain matrix products, or cuDNN's fused kernel, which needs an
    NVIDIA GPU and precision bfloat16."""
    remat: Literal[
        "everything_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "nothing_saveable",
    ] = "everything_saveable"
    """What a layer keeps for the backward pass, by JAX's names; the rest is computed again. Less
    memory for more time; with scan_layers."""
    seed: U32 = 0
    """Of everything random in training: the rounds' seeds, and so who trains on what."""
    threads: Count = 4
    """Size of XLA's thread pool on a CPU. It changes the last bits of results, cores do not."""
    overlap: Literal[0, 1, 2] = 0
    """What DisTrO does while messages travel: 0 it waits, they are applied in their round (DeMo);
    it trains the next round, 1 as Psyche's train example, 2 as Psyche's network."""
    wire: Literal["lockstep", "psyche"] = "lockstep"
    """How messages are written: lockstep codes places near their entropy, psyche writes each in
    one, two or four bytes. What they say is the same."""
    balance_speed: NotNegative = 0.0
    """How far a router's correction moves in a round, for experts that get less than their share of
    tokens and against those that get more (DeepSeek V3: 0.001); 0 leaves it as it is."""
    scan_layers: bool = False
    """Whether to loop over the layers (compiles in constant time) or to unroll them (faster)."""

    @model_validator(mode="after")
    def _devices_share_evenly(self) -> "Peers":
        if self.micro_batch % self.fsdp:
            raise wrong("micro_batch", f"a multiple of peers.fsdp ({self.fsdp})")
        if self.fsdp > 1 and self.layout == "vmap":
            raise wrong("layout", "each or shard_map with peers.fsdp: vmap computes on one device")
        return self


class Links(Table):
    """The simulated network and speed: one number for all peers, or a list with one per peer."""

    upload_mbps: _per_peer(Positive) = 20.0
    """Megabits per second from a peer."""
    download_mbps: _per_peer(Positive) = 100.0
    """Megabits per second to a peer."""
    latency_seconds: _per_peer(NotNegative) = 0.05
    """Seconds from sending to arrival, besides the transfer."""
    tokens_per_second: _per_peer(Positive) = 10_000.0
    """Tokens that a peer trains on in a second."""


class Fault(Table):
    """One peer does one thing wrong for some rounds, or each of several peers does."""

    kind: Annotated[
        FaultKind,
        Field(
            description="What it does. "
            + ". ".join(f"{name}: it {kind.says}" for name, kind in KINDS.items())
            + "."
        ),
    ]
    peer: _either(PeerNumber, SomePeers)
    """Who does it, one peer or a list of them; the first peer is 0."""
    rounds: Annotated[tuple[Count, ...], Field(min_length=2, max_length=2), AsTuple]
    """The first and the last round, both included; the run's first round is 1."""
    size: Positive | None = None
    """How strong; each kind has its own meaning and default, or none. Absent is the default."""

    @property
    def peers(self) -> tuple[int, ...]:
        """Who does it."""
        return (self.peer,) if isinstance(self.peer, int) else self.peer

    @property
    def strength(self) -> float | None:
        """`size`, or the kind's default; None: the kind has no size."""
        return KINDS[self.kind].size if self.size is None else self.size

    @model_validator(mode="after")
    def _first_is_first(self) -> "Fault":
        first, last = self.rounds
        if first > last:
            raise wrong("rounds", "[first, last] with first <= last")
        if self.kind == "join" and first != 1:
            raise wrong("rounds", "[1, last]: who joins was away from the start on")
        return self

    @model_validator(mode="after")
    def _kind_can_be_done(self) -> "Fault":
        if self.size is not None and KINDS[self.kind].size is None:
            raise wrong("size", f"none: {self.kind} has no size")
        if self.kind == "lazy" and self.strength >= 1:
            raise wrong("size", "less than 1: a share of the sequences")
        if self.kind == "collude" and len(self.peers) < 2:
            raise wrong("peer", "a list of at least 2 peers: they send the same")
        return self


class Faults(Table):
    """What goes wrong, when, for whom."""

    schedule: Annotated[tuple[Fault, ...], AsTuple] = ()
    """The faults; empty is an honest run."""

    @model_validator(mode="after")
    def _no_fault_is_doubled(self) -> "Faults":
        for later, fault in enumerate(self.schedule):
            for earlier, other in enumerate(self.schedule[:later]):
                apart = fault.rounds[0] > other.rounds[1] or other.rounds[0] > fault.rounds[1]
                same = fault.kind == other.kind and set(fault.peers) & set(other.peers)
                if same and not apart:
                    key = ("schedule", later, "rounds")
                    raise wrong(key, f"rounds outside those of faults.schedule[{earlier}]")
        return self


class Witness(Table):
    """How the run is audited."""

    snapshot_every: Count = 50
    """Rounds between snapshots: the hashes of the whole state, that peers commit to."""
    keep_every: Count = 1
    """Of the snapshots, every which is kept whole, besides the first and the last: a window that is
    replayed lies between two of these. More is less disk space, and longer windows."""
    replay_percent: Percent = 25.0
    """Percent of the windows (one peer, snapshot to snapshot) that are replayed, 0 to 100."""
    replay: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[0-9]+:[0-9]+$", max_length=20)], ...], AsTuple
    ] = ()
    """Windows that are replayed besides the sample, each "window:peer"; both count from 0."""
    policy: Literal["applied", "strict"] = "applied"
    """Which findings refuse the export: applied - only a lie that got into the params; strict -
    any, also one that was caught in its round and discarded."""
    seed: str | None = None
    """What the sample is drawn from; absent is the transcript's own hash, known to nobody before
    training ends."""

    @property
    def chosen(self) -> tuple[tuple[int, int], ...]:
        """(window, peer) of each entry of `replay`."""
        pairs = (entry.split(":") for entry in self.replay)
        return tuple((int(window), int(peer)) for window, peer in pairs)


class HeldOut(Table):
    """Loss on sequences that nobody trains on, measured while training."""

    sequences: Count = 64
    """Held-out sequences measured."""
    every: Count = 10
    """Rounds between measurements."""
    stop_above: Annotated[float, Field(gt=1)] = 1.5
    """Training stops as diverged when the held-out loss exceeds this times what it began with."""


class Pins(Table):
    """What lies outside the repository, held to what it was; `lockstep pin` writes it."""

    data: Pin = ""
    """SHA-256 of what model.LLM.data_location gave; empty is not pinned."""
    checkpoint: Pin = ""
    """SHA-256 of what model.LLM.checkpoint gave; empty is not pinned."""


class Export(Table):
    """The Hugging Face folder that comes out."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the exported weights."""


class Evaluate(Table):
    """The text sample of the exported model."""

    prompt: str = "def "
    """What it continues."""
    max_new_tokens: Count = 64
    """Tokens written."""
    temperature: NotNegative = 0.8
    """Divides the logits; 0 takes the likeliest token each time."""
    seed: U32 = 0
    """Of the sampling."""


class Runtime(Table):
    """What cannot change a result; no stage is run again for it."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """How much is said while working."""
    checkpoint_every: Count = 25
    """Rounds between checkpoints: what a kill can cost."""
    keep_steps: Count = 2
    """Newest checkpoints kept while training."""
    connections: Annotated[int, Field(ge=1, le=256)] = Network().connections
    """Files, or ranges of files, fetched at once."""
    attempts: Count = Network().attempts
    """Failures in a row, without a byte in between, after which a fetch gives up."""
    stall_seconds: Positive = Network().stall_seconds
    """Seconds without an answer, or without a byte, that count as a failure."""
    stream_cache_mb: Count = Network().cache_bytes // 10**6
    """Megabytes of memory for tokens that are read while training, with [download] stream."""

    @property
    def network(self) -> Network:
        """How the network is used."""
        cache_bytes = self.stream_cache_mb * 10**6
        return Network(self.connections, self.attempts, self.stall_seconds, cache_bytes)
