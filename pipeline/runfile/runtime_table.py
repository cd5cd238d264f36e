"""The run file's table [runtime]: how and where stages run, which changes no result."""

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lockstep.tables.faults import PeerNumber
from lockstep.tables.table import AsTuple, Count, Distinct, NotNegative, Positive, Table, wrong

SinkName = Literal["tensorboard", "wandb"]


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
    sinks: Annotated[tuple[SinkName, ...], Distinct, AsTuple] = ()
    """Experiment trackers that receive a training's curves: TensorBoard, Weights & Biases. They
    need the extra sinks."""
    sink_dir: str = ""
    """Folder for the files of sinks; empty is data/tracked."""
    sink_project: Annotated[str, Field(min_length=1)] = "lockstep"
    """Name of the project in W&B."""
    profile: str = ""
    """First and last round to profile, as in "3:6": an XLA trace, and where a round's time goes, in
    data/profiles. Empty profiles no round."""
    ray: RayCluster = RayCluster()
    """The Ray cluster, for carrier = "ray"."""
    worker_python: str = ""
    """Python that runs a workload, with its packages; empty is the Python that runs Lockstep."""
    worker_module: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")] = (
        "lockstep_worker.worker"
    )
    """Module that serves a workload: Lockstep's, or another of burn_p2p's worker protocol, such as
    burn_p2p_python_runtime.worker."""
    worker_path: Annotated[tuple[str, ...], AsTuple] = ()
    """Folders where a worker finds modules besides workloads/, before those of its Python."""
    worker_env: dict[str, str] = {}
    """Variables of a worker's environment; it inherits no others but for PATH and the like."""
    worker_start_seconds: Positive = 120.0
    """Seconds after which a worker that has not started is ended: it imports its packages then."""
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
