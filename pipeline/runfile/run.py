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

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from pipeline.errors import LockstepError
from pipeline.runfile.data import (  # noqa: F401 - a stage finds every variant here
    TOKEN_BYTES,
    Data,
    DataCorpus,
    DataDummy,
    DataHttp,
    DataHub,
    DataLocal,
    DataPreprocessed,
    DataServer,
    DataUrl,
    DataWeightedHttp,
    Download,
    Location,
    LocationGcp,
    LocationNumberedFiles,
    LocationSingleUrl,
    Shuffle,
    ShuffleDontShuffle,
    ShuffleSeeded,
)
from pipeline.runfile.explain import one_line
from pipeline.runfile.fault_kinds import KINDS, OF_OTHERS
from pipeline.runfile.network import Network
from pipeline.runfile.psyche import (  # noqa: F401 - Coordinator for whoever imports config
    LLM,
    MAX_CLIENTS,
    STATE_KEYS,
    Coordinator,
    CurrentConfig,
    Model,
    OlderConfig,
    read_config,
)
from pipeline.runfile.table import U32, AsTuple, Table, Variant, missing, variant_name, wrong  # noqa: F401
from pipeline.runfile.variants import (  # noqa: F401 - a stage finds every variant here
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


class Run(Table):
    """A whole run of Lockstep."""

    config: Annotated[
        CurrentConfig | OlderConfig,
        BeforeValidator(read_config, json_schema_input_type=CurrentConfig | OlderConfig),
    ]
    """Psyche's coordinator: rounds, epochs, batch, witnesses."""
    model: Model
    """Psyche's model: what is trained, on what, and how."""
    download: Download = Download()
    """How much of the data is fetched, and when."""
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
        return self

    @model_validator(mode="after")
    def _limit_fits(self) -> "Run":
        limit = self.download.limit
        if limit is None or limit.steps is None:
            return self
        batch, length = self.config.global_batch_size_end, self.llm.max_seq_len
        if limit.batch != batch:
            raise wrong(("download", "limit", "batch"), f"{batch}, the largest batch of [config]")
        if limit.max_seq_len != length:
            raise wrong(("download", "limit", "max_seq_len"), f"{length}, as model.LLM has it")
        if limit.steps < self.config.total_steps:
            steps = self.config.total_steps
            raise wrong(("download", "limit", "steps"), f"at least config.total_steps ({steps})")
        return self

    @model_validator(mode="after")
    def _faults_fit(self) -> "Run":
        for index, fault in enumerate(self.faults.schedule):
            if misfit := self._misfit(fault):
                key, expected = misfit
                raise wrong(("faults", "schedule", index, key), expected)
        joining = {p for f in self.faults.schedule if f.kind == "join" for p in f.peers}
        most = self.peers.count - self.config.init_min_clients
        if len(joining) > most:
            text = (
                f"at most {most} peers that join: config.init_min_clients are there from the start"
            )
            raise wrong(("faults", "schedule"), text)
        return self

    def _misfit(self, fault: Fault) -> tuple[str, str] | None:
        """The key of a fault that the rest of the run makes impossible, and what was expected."""
        count, steps, optimizer = self.peers.count, self.config.total_steps, self.llm.optimizer
        signs = isinstance(optimizer, Compressing) and optimizer.quantize_1bit
        needs = KINDS[fault.kind].needs
        if max(fault.peers) >= count:
            return "peer", f"less than peers.count ({count})"
        if fault.rounds[1] > steps:
            return "rounds", f"rounds up to config.total_steps ({steps})"
        if fault.kind in OF_OTHERS and count < 2:
            return "kind", "a kind for one peer: this one is about others"
        if needs == "values" and signs:
            return "kind", "a kind for signs, or quantize_1bit = false: signs have no size"
        if needs == "plain" and not isinstance(optimizer, Compressing):
            return "kind", "a kind for gradients: they name no places"
        if needs == "plain" and self.peers.wire != "psyche":
            return "kind", 'peers.wire = "psyche" with it: coded places cannot be named twice'
        if needs == "plain" and min(optimizer.compression_topk, optimizer.compression_chunk) < 2:
            return "kind", "more than one coefficient of a block, to name one twice"
        if fault.kind == "wrong_precision" and self.peers.layout != "each":
            return "kind", 'peers.layout = "each" with it: one peer alone runs another program'
        if fault.kind == "wrong_precision" and self.peers.attention == "cudnn":
            return "kind", 'peers.attention = "matmul" with it: cuDNN computes in bfloat16 only'
        if fault.kind == "false_verifier" and not self.config.verification_percent:
            return "kind", "config.verification_percent above 0 with it: nobody verifies"
        return None

    @model_validator(mode="after")
    def _verifiers_fit(self) -> "Run":
        key, percent = ("config", "verification_percent"), self.config.verification_percent
        if percent and self.peers.layout != "each":
            text = "a verifier runs a trainer's own program"
            raise wrong(key, f"0 with peers.layout = {self.peers.layout}: {text}")
        least = self.config.min_clients
        if least - least * percent // 100 < 1:
            raise wrong(key, f"less than 100: of min_clients ({least}) one at least must train")
        return self

    @model_validator(mode="after")
    def _chosen_windows_exist(self) -> "Run":
        # a run that extends another has fewer: what lies beyond those the witness must find out
        every = self.witness.snapshot_every * self.witness.keep_every
        windows = -(-self.config.total_steps // every)
        for index, (window, peer) in enumerate(self.witness.chosen):
            if window >= windows or peer >= self.peers.count:
                text = f"a window below {windows} and a peer below {self.peers.count}"
                raise wrong(("witness", "replay", index), text)
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
