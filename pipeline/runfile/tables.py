"""Lockstep's own tables of a run file: peers, links, faults, the audit and the rest."""

import re
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from pipeline.runfile.fault_kinds import KINDS
from pipeline.runfile.psyche import MAX_CLIENTS
from pipeline.runfile.table import U16, U32, AsTuple, Count, Distinct, NotNegative, Table, wrong

Positive = Annotated[float, Field(gt=0)]
Percent = Annotated[float, Field(ge=0, le=100)]
MAX_THREADS = 1024  # more than any machine has cores for, and few enough to start them all
# Bounds of a link. Within them, every time is a finite number, however large a message is.
Speed = Annotated[float, Field(ge=0.001)]
Latency = Annotated[float, Field(ge=0, le=1e6)]
Pin = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]

FaultName = Literal[tuple(KINDS)]
PeerNumber = Annotated[int, Field(ge=0)]
SinkName = Literal["tensorboard", "wandb", "mlflow"]


SomePeers = Annotated[tuple[PeerNumber, ...], Field(min_length=1), Distinct, AsTuple]


def _either(number: Any, numbers: Any) -> Any:
    """The type of a number or a list, discriminated so that an error is about one of them."""
    return Annotated[
        Annotated[number, Tag("number")] | Annotated[numbers, Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list | tuple) else "number"),
    ]


def _per_peer(number: Any) -> Any:
    """The type of one number for all peers, or a list with one number per peer."""
    return _either(number, Annotated[tuple[number, ...], AsTuple])


class Peers(Table):
    """The peers that train, and how they compute; by default, config.init_min_clients peers."""

    count: Annotated[int, Field(ge=1, le=MAX_CLIENTS)]
    """Number of peers, 1 to 256; at least config.init_min_clients."""
    layout: Literal["each", "shard_map", "vmap", "pmap"] = "each"
    """How peers run on devices. each: one program per peer, which an audit replays bit for bit.
    shard_map: one program over all devices; pmap is an alias. vmap: one program on one device."""
    micro_batch: Count = 4
    """Sequences per gradient computation of a peer; a smaller number needs less memory."""
    fsdp: Count = 1
    """Devices per peer, over which its params, state and micro-batches are sharded; for models too
    large for one device. Must divide micro_batch."""
    processes: Count = 1
    """Processes per peer, on one host or several, which share its devices equally; they change the
    last bits of results. Must divide fsdp; more than 1 need runtime.carrier = "processes"."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the model's arithmetic; params and optimizer state stay float32."""
    attention: Literal["matmul", "cudnn"] = "matmul"
    """Implementation of attention: plain matrix products, or cuDNN's fused kernel, which needs an
    NVIDIA GPU and precision bfloat16."""
    remat: Literal[
        "everything_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "nothing_saveable",
    ] = "everything_saveable"
    """What each layer saves for the backward pass, as one of JAX's checkpoint policies; everything
    else is recomputed, which trades time for memory. Applies with scan_layers."""
    seed: U32 = 0
    """Seed of all randomness in training: the seeds of the rounds, and so who trains on what."""
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 4
    """Threads of XLA's thread pool on a CPU. They change the last bits of results; cores do not."""
    overlap: Literal[0, 1, 2] = 0
    """Overlap of DisTrO's communication with training. 0: peers wait, and messages are applied in
    their own round (DeMo). 1: peers train the next round meanwhile, as in Psyche's train example.
    2: the same as on Psyche's network."""
    wire: Literal["lockstep", "psyche"] = "lockstep"
    """Encoding of messages: lockstep compresses indices to near their entropy; psyche writes each
    index in one, two or four bytes. The content is the same."""
    balance_speed: NotNegative = 0.0
    """Step size per round of the router's load-balancing bias in mixture-of-experts models: up for
    experts that receive less than their share of tokens, down for the others (DeepSeek V3: 0.001).
    0 leaves the bias unchanged."""
    scan_layers: bool = False
    """Whether layers run as a loop (compiles in constant time) or unrolled (runs faster)."""

    @property
    def named_layout(self) -> str:
        """`layout` and, of an alias, what it stands for: JAX builds pmap on shard_map."""
        return "pmap (shard_map)" if self.layout == "pmap" else self.layout

    @model_validator(mode="after")
    def _devices_share_evenly(self) -> "Peers":
        if self.micro_batch % self.fsdp:
            raise wrong("micro_batch", f"a multiple of peers.fsdp ({self.fsdp})")
        if self.fsdp % self.processes:
            raise wrong("processes", f"a divisor of peers.fsdp ({self.fsdp})")
        if self.fsdp > 1 and self.layout == "vmap":
            raise wrong("layout", "each or shard_map with peers.fsdp, since vmap uses one device")
        return self


class Links(Table):
    """The simulated network and speed: one number for all peers, or a list with one per peer."""

    upload_mbps: _per_peer(Speed) = 20.0
    """Upload bandwidth of a peer, in megabits per second."""
    download_mbps: _per_peer(Speed) = 100.0
    """Download bandwidth of a peer, in megabits per second."""
    latency_seconds: _per_peer(Latency) = 0.05
    """Latency of a message in seconds, in addition to its transfer time."""
    tokens_per_second: _per_peer(Speed) = 10_000.0
    """Training speed of a peer, in tokens per second."""
    clock: Literal["simulated", "wall"] = "simulated"
    """Which clock decides who is late. simulated: the one that the numbers above give, which an
    audit computes again. wall: real time, with peers in processes of their own; it is recorded, and
    an audit takes the author's word for it. A step is compiled before its round begins, so
    config.max_round_train_time need not leave room for that."""

    def check(self, count: int, said: str = "peers.count") -> None:
        """Check that each list has a number for each of `count` peers, which errors call `said`.

        Raises:
          PydanticCustomError: One has another length, with its key and what was expected.
        """
        for key in Links.model_fields:
            value = getattr(self, key)
            if isinstance(value, tuple) and len(value) != count:
                raise wrong(("links", key), f"one number, or {count} of them ({said})")


class Fault(Table):
    """One kind of fault, committed by one or several peers for some rounds."""

    kind: Annotated[
        FaultName,
        Field(
            description="Kind of the fault, by what the peer does. "
            + ". ".join(f"{name}: it {kind.does}" for name, kind in KINDS.items())
            + "."
        ),
    ]
    peer: _either(PeerNumber, SomePeers)
    """The faulty peer, or a list of them; the first peer is 0."""
    rounds: Annotated[tuple[Count, ...], Field(min_length=2, max_length=2), AsTuple]
    """First and last round of the fault, inclusive; the first round of a run is 1."""
    size: Positive | None = None
    """Strength of the fault. Meaning and default depend on `kind`; some kinds have none."""

    @property
    def peers(self) -> tuple[int, ...]:
        """The faulty peers."""
        return (self.peer,) if isinstance(self.peer, int) else self.peer

    @property
    def strength(self) -> float | None:
        """`size`, or the default of the kind; None for a kind without a size."""
        return KINDS[self.kind].size if self.size is None else self.size

    @model_validator(mode="after")
    def _first_is_first(self) -> "Fault":
        first, last = self.rounds
        if first > last:
            raise wrong("rounds", "[first, last] with first <= last")
        if self.kind == "join" and first != 1:
            raise wrong("rounds", "[1, last], since a joining peer is offline from the start")
        return self

    @model_validator(mode="after")
    def _kind_can_be_done(self) -> "Fault":
        if self.size is not None and KINDS[self.kind].size is None:
            raise wrong("size", f"no size, which {self.kind} does not have")
        if self.kind == "lazy" and self.strength >= 1:
            raise wrong("size", "less than 1, a fraction of the sequences")
        if self.kind == "collude" and len(self.peers) < 2:
            raise wrong("peer", "a list of at least 2 peers, which send the same message")
        return self


Schedule = Annotated[tuple[Fault, ...], AsTuple]


class Faults(Table):
    """Faults that peers commit on purpose, to test the audit."""

    schedule: Schedule = ()
    """The faults; an empty list is an honest run."""


class Witness(Table):
    """How much of the run is audited, and what refuses its export."""

    snapshot_every: Count = 50
    """Rounds between snapshots, at which peers commit to the hashes of their whole state."""
    keep_every: Count = 1
    """Keep the full state of every n-th snapshot, and of the first and last; the others keep hashes
    only. A replayed window spans two full snapshots, so a larger n saves disk space and makes
    windows longer."""
    replay_percent: Percent = 25.0
    """Percentage of windows to replay, 0 to 100; a window is one peer from one full snapshot to the
    next."""
    replay: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[0-9]+:[0-9]+$", max_length=20)], ...], AsTuple
    ] = ()
    """Windows to replay in addition to the sample, each as "window:peer"; both count from 0."""
    policy: Literal["applied", "strict"] = "applied"
    """Findings that refuse the export. applied: only those of a lie that was applied to the params.
    strict: any, including lies that were caught and discarded in their round."""
    seed: str | None = None
    """Seed of the sample; by default the hash of the transcript, which nobody knows before training
    ends."""

    @property
    def chosen(self) -> tuple[tuple[int, int], ...]:
        """The (window, peer) pairs of `replay`."""
        pairs = (entry.split(":") for entry in self.replay)
        return tuple((int(window), int(peer)) for window, peer in pairs)


class HeldOut(Table):
    """Loss on sequences that no peer trains on, measured during training."""

    sequences: Annotated[int, Field(ge=0)] = 64
    """Number of held-out sequences per measurement. With 0 nothing is measured, and a file that is
    held out only because there is no folder held_out/ is trained on."""
    every: Count = 10
    """Rounds between measurements."""
    stop_above: Annotated[float, Field(gt=1)] = 1.5
    """Multiple of the initial held-out loss above which training stops as diverged."""


class Pins(Table):
    """Hashes of inputs from outside the repository; `lockstep pin` writes them."""

    data: Pin = ""
    """SHA-256 of the data that model.LLM.data_location must have; empty means not pinned."""
    checkpoint: Pin = ""
    """SHA-256 of the files that model.LLM.checkpoint must have; empty means not pinned."""
    tasks: Pin = ""
    """SHA-256 of the definitions and documents that evaluate.tasks must have, of those tasks that
    lm_eval runs; empty means not pinned."""


class Export(Table):
    """The exported Hugging Face folder."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the exported weights."""
    every_epoch: bool = False
    """Whether training pushes its params at the end of each epoch, unaudited, to where `[config]
    checkpointers` say: to the branch, or the folder, `unaudited`."""


class Network(Table):
    """Settings of the network, a part of `[runtime]`."""

    connections: Annotated[int, Field(ge=1, le=256)] = 8
    """Parallel downloads, of files or ranges of files, 1 to 256."""
    attempts: Count = 8
    """Consecutive failures that bring next to nothing, less than 1 KiB and less than half of what
    is left, after which a download gives up."""
    stall_seconds: Positive = 30.0
    """Seconds without a response or a byte that count as a failure."""
    stream_cache_mb: Positive = 256.0
    """Memory for streamed tokens, in megabytes; applies with [download] stream."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of `stream_cache_mb`."""
        return round(self.stream_cache_mb * 10**6)


class RayCluster(Table):
    """The Ray cluster that runs the peers, and what each of them takes of it."""

    address: str = "auto"
    """The cluster's address, as for `ray.init`; empty starts a cluster on this host."""
    cpus: NotNegative = 1.0
    """Cores that a peer reserves."""
    gpus: NotNegative = 0.0
    """GPUs that a peer reserves; one for each of peers.fsdp."""
    memory_gb: NotNegative = 0.0
    """Memory that a peer reserves, in 10^9 bytes; 0 reserves none."""
    strategy: Literal["SPREAD", "DEFAULT", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"
    """How Ray places peers: SPREAD over the hosts, or DEFAULT, on as few as it takes. The strict
    ones reserve everything at once, in a placement group: each peer on a host of its own, or all on
    one host."""
    working_dir: str = ""
    """Folder of the project that is copied to each host; empty where hosts have it at this path."""


class Runtime(Network):
    """Settings that cannot change a result; no stage runs again when they change."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """Level of detail of the log."""
    checkpoint_every: Count = 25
    """Rounds between training checkpoints: the most work that a kill can cost."""
    keep_steps: Count = 2
    """Number of training checkpoints to keep, the newest ones."""
    carrier: Literal["in_process", "processes", "ray"] = "in_process"
    """Where peers run. in_process: all in the process that trains. processes: each in a process of
    its own, which the trainer starts on this host. ray: each an actor of a Ray cluster."""
    by_hand: Annotated[tuple[PeerNumber, ...], AsTuple] = ()
    """Peers whose processes the trainer does not start: `lockstep sidecar` starts them, on any host
    that reaches the trainer. Applies to carrier = "processes"."""
    listen: Annotated[str, Field(pattern=r"^[^:/]+:[0-9]{1,5}$")] = "127.0.0.1:0"
    """Address, host:port, where the trainer waits for its peers' processes; port 0 is any free one.
    A process that connects must know a key of the run. Applies to carrier = "processes"."""
    answer_seconds: Positive = 600.0
    """Seconds after which a peer's process that has not started, or not answered, is lost. The
    first step takes long, since it compiles."""
    metrics_port: U16 = 0
    """Port on 127.0.0.1 at which a training serves its numbers to Prometheus, under /metrics; 0
    serves no metrics."""
    sinks: Annotated[tuple[SinkName, ...], Distinct, AsTuple] = ()
    """Experiment trackers that receive a training's curves: TensorBoard, Weights & Biases, MLflow.
    They need the extra sinks."""
    sink_dir: str = ""
    """Folder for the files of sinks; empty is data/tracked."""
    sink_project: Annotated[str, Field(min_length=1)] = "lockstep"
    """Name of the project in W&B, and of the experiment in MLflow."""
    profile: str = ""
    """First and last round to profile, as in "3:6": an XLA trace, and where a round's time goes, in
    data/profiles. Empty profiles no round."""
    ray: RayCluster = RayCluster()
    """The Ray cluster, for carrier = "ray"."""
    memory_gb: Positive | None = None
    """Memory that a model, and the first array of a micro-batch, must fit into, in 10^9 bytes; by
    default that of the machine or its container. With swap it may be more."""

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last round of `profile`."""
        first, _, last = self.profile.partition(":")
        return (int(first), int(last)) if last else None

    @model_validator(mode="after")
    def _profile_is_a_range(self) -> "Runtime":
        known = not self.profile or re.fullmatch(r"[1-9][0-9]{0,8}:[1-9][0-9]{0,8}", self.profile)
        if not known or (self.profiled and self.profiled[0] > self.profiled[1]):
            raise wrong("profile", "first:last, two rounds with first <= last")
        return self
