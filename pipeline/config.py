"""A run file (params/run.toml) as frozen models: Psyche's tables and ours.

    run = config.load(Path("params/run.toml"))
    match run.llm.optimizer:
        case config.OptimizerDistro() as distro: ...

An unknown key, a wrong type or an impossible mix is one line of `LockstepError`. Every variant of
Psyche's enums loads; a stage that has no engine for one refuses it by `variant_name`.
"""

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from pipeline.complaints import one_line
from pipeline.errors import LockstepError
from pipeline.locations import (  # noqa: F401 - a stage finds every variant here
    TOKEN_BYTES,
    Data,
    DataCorpus,
    DataDummy,
    DataHttp,
    DataLocal,
    DataPreprocessed,
    DataServer,
    DataWeightedHttp,
    Location,
    LocationGcp,
    LocationNumberedFiles,
    LocationSingleUrl,
    Shuffle,
    ShuffleDontShuffle,
    ShuffleSeeded,
)
from pipeline.psyche import (  # noqa: F401 - Coordinator for whoever imports config
    LLM,
    MAX_CLIENTS,
    STATE_KEYS,
    Coordinator,
    CurrentConfig,
    Model,
    OlderConfig,
    read_config,
)
from pipeline.table import U32, AsTuple, Table, Variant, missing, variant_name, wrong  # noqa: F401
from pipeline.variants import (  # noqa: F401 - a stage finds every variant here
    Checkpoint,
    CheckpointDummy,
    CheckpointEphemeral,
    CheckpointGcs,
    CheckpointHub,
    CheckpointInit,
    CheckpointP2P,
    CheckpointP2PGcs,
    CheckpointRun,
    Compressing,
    Dense,
    Optimizer,
    OptimizerAdaDistro,
    OptimizerAdamW,
    OptimizerDistro,
    OptimizerDummy,
    OptimizerMuon,
    Schedule,
    ScheduleConstant,
    ScheduleCosine,
    ScheduleLinear,
    ScheduleWarmupStableDecay,
)

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Percent = Annotated[float, Field(ge=0, le=100)]
Pin = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]

FaultKind = Literal["sign_flip"]  # every kind there is; pipeline/swarm/faults.py does them


def _per_peer(number: Any) -> Any:
    """The type of one number for all peers, or a list with one number per peer."""
    return Annotated[
        Annotated[number, Tag("number")] | Annotated[tuple[number, ...], AsTuple, Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number"),
    ]


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
    """One peer does one thing wrong for some rounds."""

    kind: FaultKind
    """What it does: sign_flip sends the negative of its message."""
    peer: Annotated[int, Field(ge=0)]
    """Who does it; the first peer is 0."""
    rounds: Annotated[tuple[Count, ...], AsTuple, Field(min_length=2, max_length=2)]
    """The first and the last round, both included; the run's first round is 1."""

    @model_validator(mode="after")
    def _first_is_first(self) -> "Fault":
        first, last = self.rounds
        if first > last:
            raise wrong("rounds", "[first, last] with first <= last")
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
                if (fault.kind, fault.peer) == (other.kind, other.peer) and not apart:
                    key = ("schedule", later, "rounds")
                    raise wrong(key, f"rounds outside those of faults.schedule[{earlier}]")
        return self


class Witness(Table):
    """How the run is audited."""

    snapshot_every: Count = 50
    """Rounds between snapshots of the full state: the window that is replayed, and disk space."""
    replay_percent: Percent = 25.0
    """Percent of the windows (one peer, snapshot to snapshot) that are replayed, 0 to 100."""
    seed: str | None = None
    """What the sample is drawn from; absent is the transcript's own hash, known to nobody before
    training ends."""


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


class Run(Table):
    """A whole run of Lockstep."""

    config: Annotated[
        CurrentConfig | OlderConfig,
        BeforeValidator(read_config, json_schema_input_type=CurrentConfig | OlderConfig),
    ]
    """Psyche's coordinator: rounds, epochs, batch, witnesses."""
    model: Model
    """Psyche's model: what is trained, on what, and how."""
    peers: Peers = Field(
        default_factory=lambda fields: Peers(count=fields["config"].init_min_clients)
    )
    """Who trains, and how each peer computes; absent is config.init_min_clients peers."""
    links: Links = Links()
    """The simulated network and speed of the peers."""
    faults: Faults = Faults()
    """What goes wrong, when, for whom."""
    witness: Witness = Witness()
    """How the run is audited."""
    held_out: HeldOut = HeldOut()
    """Loss on sequences that nobody trains on, measured while training."""
    pins: Pins = Pins()
    """What lies outside the repository, held to what it was."""
    export: Export = Export()
    """The Hugging Face folder that comes out."""
    evaluate: Evaluate = Evaluate()
    """The text sample of the exported model."""
    runtime: Runtime = Runtime()
    """What cannot change a result; no stage is run again for it."""

    @property
    def llm(self) -> LLM:
        """The table [model.LLM]."""
        return self.model.LLM

    @model_validator(mode="after")
    def _cold_start_fits(self) -> "Run":
        key = ("model", "LLM", "cold_start_warmup_steps")
        most, formula = self.config.cold_start_limit()
        if self.llm.cold_start_warmup_steps > most:
            raise wrong(key, f"at most {formula} = {most}")
        stated = "cold_start_warmup_steps" in self.llm.model_fields_set
        if not stated and isinstance(self.config, CurrentConfig):
            raise missing(*key)
        return self

    @model_validator(mode="after")
    def _peers_fit(self) -> "Run":
        count = self.peers.count
        if count < self.config.init_min_clients:
            least = self.config.init_min_clients
            raise wrong(("peers", "count"), f"at least config.init_min_clients ({least})")
        for key in Links.model_fields:
            value = getattr(self.links, key)
            if isinstance(value, tuple) and len(value) != count:
                raise wrong(("links", key), f"one number, or {count} of them (peers.count)")
        for index, fault in enumerate(self.faults.schedule):
            path = ("faults", "schedule", index)
            if fault.peer >= count:
                raise wrong((*path, "peer"), f"less than peers.count ({count})")
            if fault.rounds[1] > self.config.total_steps:
                most = self.config.total_steps
                raise wrong((*path, "rounds"), f"rounds up to config.total_steps ({most})")
        return self


def load(path: Path) -> Run:
    """Reads and validates a run file.

    Raises:
      LockstepError: no such file, no TOML, or not a run.
    """
    document = read_toml(path)
    for key in STATE_KEYS:
        if key in document:
            raise LockstepError(
                f"{path}: {key}: a key of Psyche's state files, expected a run file; "
                f"`lockstep import {path}` makes one"
            )
    return parse(document, str(path))


def parse(document: dict, name: str) -> Run:
    """Validates a parsed run file.

    Args:
      document: what `tomllib` made of it.
      name: what errors call the file.

    Raises:
      LockstepError: it is not a run.
    """
    try:
        return Run.model_validate(document)
    except ValidationError as error:
        raise LockstepError(f"{name}: {one_line(error, document, Run)}") from error


def read_toml(path: Path) -> dict:
    """Parses a TOML file.

    Raises:
      LockstepError: no such file, or no TOML; the line number is named.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise LockstepError(f"{path}: {error.strerror}, expected a run file") from error
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise LockstepError(f"{path}:{line}: byte 0x{byte:02x}, expected UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        line = int(place[1]) if place else content.count(b"\n") + 1
        reason = str(error).split(" (at ")[0]
        raise LockstepError(f"{path}:{line}: {reason}, expected TOML") from error
    except (ValueError, RecursionError) as error:  # numbers of 4300 digits, lists 300 deep
        raise LockstepError(f"{path}: {error}, expected TOML") from error
