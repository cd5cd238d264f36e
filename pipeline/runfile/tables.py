"""Lockstep's own tables of a run file: peers, faults, the audit; `[runtime]` changes no result."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lockstep.tables.faults import Schedule
from lockstep.tables.peers import Aggregation, Bits, Liars, PeerCount, PeerLayout, ProductBits
from lockstep.tables.table import U32, AsTuple, Count, Distinct, NotNegative, Positive, Table, wrong

Percent = Annotated[float, Field(ge=0, le=100)]
MAX_THREADS = 1024  # more than any machine has cores for, and few enough to start them all
Pin = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Peers(Table):
    """The peers that train, and how they compute; by default, config.init_min_clients peers."""

    count: PeerCount
    """Number of peers, 1 to 256; at least config.init_min_clients."""
    layout: PeerLayout = "each"
    """How peers run on devices. each: one program per peer, which an audit replays bit for bit.
    shard_map: one program over all devices; pmap is an alias. vmap: one program on one device."""
    micro_batch: Count = 4
    """Sequences per gradient computation of a peer; a smaller number needs less memory."""
    fsdp: Count = 1
    """Devices per peer, over which its params, state and micro-batches are sharded; for models too
    large for one device. Must divide micro_batch."""
    processes: Count = 1
    """Processes per peer, on one host or several; they share its devices equally. Their number
    changes the last bits of results and must divide fsdp; more than 1 needs runtime.carrier =
    "processes"."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the model's arithmetic; params and optimizer state stay float32."""
    attention: Literal["matmul", "cudnn"] = "matmul"
    """Implementation of attention: plain matrix products, or cuDNN's fused kernel, which needs an
    NVIDIA GPU, precision bfloat16 and scan_layers."""
    bits: Annotated[Bits, Field(exclude_if=lambda bits: bits == "machine")] = "machine"
    """Where a step has the same bits. machine: on machines like the one that trained. everywhere:
    on every machine, since each operation follows a fixed rule; a step takes 1.4 to 2 times as
    long. An audit compares bits, so that of machine is possible only on such a machine."""
    product_bits: Annotated[ProductBits, Field(exclude_if=lambda bits: bits == 20)] = 20
    """Precision, in bits, of the operands of the model's matrix products with bits = "everywhere".
    20: with a scale for each vector that is summed over. 8: with a scale for each block of 256
    terms of such a vector; about a third less time."""
    remat: Literal[
        "everything_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "nothing_saveable",
    ] = "everything_saveable"
    """What each layer saves for the backward pass, as one of JAX's checkpoint policies; everything
    else is recomputed, which trades time for memory. Applies with scan_layers."""
    head_tokens: Annotated[Count | None, Field(exclude_if=lambda tokens: tokens is None)] = None
    """Tokens of a micro-batch whose logits a step makes at a time. More need more memory, six bytes
    for each logit, and move fewer bytes: each part adds to a sum as large as the model's head. By
    default as many as have 2^25 logits. It changes the last bits of results, also by rules."""
    seed: U32 = 0
    """Seed of all randomness in training: the seed of each round follows from it, and so does which
    peer trains on what."""
    passes: Annotated[int, Field(ge=1, lt=2**32, exclude_if=lambda passes: passes == 1)] = 1
    """Maximum number of passes over the data. Each pass over shuffled data has a new order, which
    follows from the seed of the shuffle; data that is not shuffled repeats in the same order."""
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 4
    """Threads of XLA's thread pool on a CPU. They change the last bits of steps as compiled; cores
    do not."""
    overlap: Literal[0, 1, 2] = 0
    """Overlap of DisTrO's communication with training. 0: peers wait, and messages are applied in
    their own round (DeMo). 1: peers train the next round meanwhile, as in Psyche's train example.
    2: the same as on Psyche's network."""
    wire: Literal["lockstep", "psyche"] = "lockstep"
    """Encoding of messages: lockstep compresses indices to near their entropy; psyche writes each
    index in one, two or four bytes. The content is the same."""
    aggregation: Aggregation = "mean"
    """How the messages of several peers are merged. mean: their mean; for top-k messages, the mean
    of each element over the peers that sent it. peer_mean: for top-k messages, the mean over all
    peers that are present, where an element that is not sent counts as zero. median: the median of
    each element. trimmed_mean: the mean of each element without its `liars` largest and smallest
    values. min_support: the mean of each element that more than `liars` peers sent. norm_clip: the
    mean, after norms are clipped to their median. centered_clip: the median, moved three times by
    the mean of the clipped differences from it. multi_krum: the mean without the `liars` peers that
    are farthest from their neighbours. rda: the mean direction of each parameter, times the mean
    norm. rda_median_norm: the same direction, times the median norm."""
    liars: Liars | None = None
    """Number of peers that may lie; trimmed_mean, min_support and multi_krum need it."""
    balance_speed: NotNegative = 0.0
    """Step size per round of the router's load-balancing bias in mixture-of-experts models; the
    bias rises for experts that receive less than their share of tokens, and falls for the others
    (DeepSeek V3: 0.001). 0 leaves the bias unchanged."""
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
        if self.bits == "everywhere" and self.attention == "cudnn":
            raise wrong("attention", 'matmul with peers.bits = "everywhere": cuDNN has no rule')
        if self.attention == "cudnn" and not self.scan_layers:
            # Unrolled, the first step ends with an IndexError: a deterministic program runs the
            # kernel's backward pass only once (openxla/xla#46500, open; seen with JAX 0.11.2).
            raise wrong("attention", "matmul, or peers.scan_layers = true: XLA runs cudnn only so")
        if self.bits == "machine" and self.product_bits != 20:
            raise wrong("product_bits", '20 without peers.bits = "everywhere"')
        if self.fsdp > 1 and self.layout == "vmap":
            raise wrong("layout", "each or shard_map with peers.fsdp, since vmap uses one device")
        return self


class Faults(Table):
    """Faults that peers commit on purpose, to test the audit."""

    schedule: Schedule = ()
    """The faults; an empty list is an honest run."""


DRAND = r"drand quicknet (?P<round>[1-9][0-9]{0,17}) (?P<signature>[0-9a-f]{96})"


class Witness(Table):
    """How much of the run is audited, and which findings refuse the export."""

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
    """Findings that refuse the export. applied: only findings of a lie that was applied to the
    params. strict: any, including lies that were caught and discarded in their round."""
    seed: str | None = None
    """Seed of the sample; by default the hash of the transcript, which nobody knows before training
    ends."""

    beacon: Annotated[str, Field(max_length=1000)] = ""
    """A random value that nobody chose and that is known only after training. With the transcript's
    hash it seeds the sample here and that of a publication. Either "drand quicknet ROUND
    SIGNATURE", whose signature is checked without a network (`pip install -c constraints.txt -e
    '.[beacon]'`), or any other text; empty means none."""

    @model_validator(mode="after")
    def _has_one_seed(self) -> "Witness":
        if self.beacon and self.seed is not None:
            raise wrong("beacon", "none with witness.seed, which draws the sample by itself")
        plain = re.sub(r"[\W_]", "", self.beacon).lower()
        is_drand = "drand" in plain or "quicknet" in plain  # however it is spelt
        if is_drand and not re.fullmatch(DRAND, self.beacon):
            raise wrong("beacon", "drand quicknet ROUND SIGNATURE, of 96 hexadecimal digits")
        return self

    @property
    def chosen(self) -> tuple[tuple[int, int], ...]:
        """The (window, peer) pairs of `replay`."""
        pairs = (entry.split(":") for entry in self.replay)
        return tuple((int(window), int(peer)) for window, peer in pairs)


class HeldOut(Table):
    """Loss on sequences that no peer trains on, measured during training."""

    sequences: Annotated[int, Field(ge=0)] = 512
    """Number of held-out sequences per measurement, drawn from the whole split by [peers] seed; all
    of them if the split has fewer. With 0 nothing is measured, and a file that would be held out
    only because no file's name says what to hold out is trained on."""
    rows: Literal["all", "scoring", "tuning"] = Field(
        default="all", exclude_if=lambda rows: rows == "all"
    )
    """Half of the split from which the sequences are drawn, so that a training whose settings were
    tuned on some documents is scored on others. The halves meet between two files of data/shards,
    at the border nearest to the middle, which with most_seen_percent is one between documents;
    where the middle half of the split has none, in the middle."""
    every: Count = 10
    """Rounds between measurements."""
    stop_above: Annotated[float, Field(gt=1)] = 1.5
    """Multiple of the initial held-out loss above which training stops as diverged."""


class Pins(Table):
    """Hashes of inputs from outside the repository; `lockstep pin` writes them."""

    data: Pin = ""
    """SHA-256 that the data of model.LLM.data_location must have; empty means not pinned."""
    checkpoint: Pin = ""
    """SHA-256 that the files of model.LLM.checkpoint must have; empty means not pinned."""
    tasks: Pin = ""
    """SHA-256 that the definitions and documents of evaluate.tasks must have, for those tasks that
    lm_eval runs; empty means not pinned."""


class Export(Table):
    """The exported Hugging Face folder."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of the exported weights."""
    every_epoch: bool = False
    """Whether training pushes its params, which nobody has audited yet, at the end of each epoch to
    the destinations in `[config] checkpointers`: to the branch or folder `unaudited`."""


TaskNames = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Distinct, AsTuple]


class Evaluate(Table):
    """The tasks for the exported model, and its text sample."""

    tasks: TaskNames = ("next_line",)
    """Tasks to score the model on. next_line asks which of four lines follows some lines of the
    held-out text. All others need `pip install -c constraints.txt -e '.[eval]'`: tasks and groups
    of lm_eval by name, Psyche's ten by Psyche's names, and YAML files of tasks in lm_eval's form,
    which also need trust_task_code (docs/reference/tasks.md)."""
    trust_task_code: bool = False
    """Whether tasks may run code that is not lm_eval's own: YAML files, and metrics that are
    fetched from the hub as code. Such code runs with all your rights."""
    questions: Count = 500
    """Maximum number of questions of next_line."""
    few_shot: Annotated[int, Field(ge=0, le=100)] | None = None
    """Number of solved examples before each document; by default the number that each task defines.
    As in lm_eval, a task that defines 0 keeps 0."""
    few_shot_seed: U32 = 1234
    """Seed of the choice of these examples; lm_eval's own is 1234."""
    limit: Count | None = None
    """Maximum number of documents per task, counted from its first; by default all."""
    batch_size: Count = 32
    """Number of requests that are computed at once; it changes the last bits of scores."""
    every: Annotated[int, Field(ge=0)] = 0
    """Rounds between scores during training, which are written to metrics/tasks.tsv; 0 scores
    nothing."""
    sample_tasks: TaskNames = ("next_line",)
    """Tasks that are scored during training, named as in `tasks`; they ignore few_shot and
    few_shot_seed."""
    sample: Count = 100
    """Maximum number of questions or documents per task during training, counted from its first."""
    prompt: str = "def "
    """Text that the model continues."""
    max_new_tokens: Annotated[int, Field(ge=1, le=2**16)] = 64
    """Maximum number of tokens to generate, at most 65,536."""
    temperature: NotNegative = 0.8
    """Temperature of the sampler, a divisor of the logits; 0 always takes the most likely token."""
    seed: U32 = 0
    """Seed of the sampler."""


# ---- [runtime]: how and where stages run ----

SinkName = Literal["tensorboard", "wandb"]


class Network(Table):
    """Settings of the network, a part of `[runtime]`."""

    connections: Annotated[int, Field(ge=1, le=256)] = 8
    """Parallel downloads, of files or ranges of files, 1 to 256."""
    attempts: Count = 8
    """Number of consecutive failures after which a download gives up. Only failures that bring next
    to nothing count: less than 1 KiB, and less than half of what is left."""
    stall_seconds: Positive = 30.0
    """Seconds without a response, or with less than 1 KiB of one, that count as a failure."""
    stream_cache_mb: Positive = 256.0
    """Memory for streamed tokens, in megabytes; applies with [download] stream."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of `stream_cache_mb`."""
        return round(self.stream_cache_mb * 10**6)


class CoreRuntime(Network):
    """Settings that cannot change a result; no stage runs again when they change."""

    told: ClassVar[tuple[str, ...]] = ()
    """Keys that others are told, since tables beside this one rest on them."""

    log_level: Literal["debug", "info", "warning"] = "info"
    """Level of detail of the log."""
    checkpoint_every: Count = 25
    """Rounds between training checkpoints: the most work that a kill can cost."""
    keep_steps: Count = 2
    """Number of training checkpoints to keep, from the newest on."""
    answer_seconds: Positive = 600.0
    """Seconds after which a peer's process that has not started, or has not answered, counts as
    lost. The first step takes long, since it compiles."""
    sinks: Annotated[tuple[SinkName, ...], Distinct, AsTuple] = ()
    """Experiment trackers that receive a training's curves: TensorBoard, Weights & Biases. They
    need the extra sinks."""
    sink_dir: str = ""
    """Folder for the files of sinks; empty means data/tracked."""
    sink_project: Annotated[str, Field(min_length=1)] = "lockstep"
    """Name of the project in W&B."""
    profile: str = ""
    """First and last round to profile, such as "3:6". An XLA trace and the breakdown of a round's
    time are written to data/profiles. Empty profiles no round."""
    memory_gb: Positive | None = None
    """Memory that a model, and the first array of a micro-batch, must fit into, in 10^9 bytes; by
    default that of the machine or its container. With swap space it may be higher."""

    @property
    def in_one_process(self) -> bool:
        """Whether all peers run in the process that trains."""
        return True

    @property
    def begins_late(self) -> bool:
        """Whether a training may begin after rounds that others trained."""
        return False

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last round of `profile`."""
        first, _, last = self.profile.partition(":")
        return (int(first), int(last)) if last else None

    @model_validator(mode="after")
    def _profile_is_a_range(self) -> "CoreRuntime":
        valid = not self.profile or re.fullmatch(r"[1-9][0-9]{0,8}:[1-9][0-9]{0,8}", self.profile)
        if not valid or (self.profiled and self.profiled[0] > self.profiled[1]):
            raise wrong("profile", "first:last, two rounds with first <= last")
        return self
