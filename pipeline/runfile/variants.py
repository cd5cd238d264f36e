"""`[model.LLM]` checkpoint, lr_schedule and optimizer: each variant is a class.

A class is named after its enum and Psyche's variant. Fields and rules are Psyche's, those of its
`Model::check` included; where Psyche cuts a string short or never looks at a number, we refuse it.
Our own: `CheckpointInit`, `CheckpointRun`, a manifest's `generation`, `OptimizerMuon` and
`OptimizerAdaDistro`.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from pipeline.runfile.serde_enum import Variant, one_of
from pipeline.runfile.table import (
    NAME_BYTES,
    U16,
    U32,
    AsTuple,
    Name,
    Table,
    text,
    wrong,
)

Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


# ---- checkpoint ----


def _repo_or_folder(value: str) -> str:
    size, is_path = len(value.encode()), value.startswith(("/", "./", "../"))
    if not value:
        raise wrong((), "a string that is not empty")
    if size > NAME_BYTES and not is_path:
        most = f"at most {NAME_BYTES} bytes, or a folder that begins with / or ./ or ../"
        raise wrong((), f"{most}, and this has {size}")
    return value


class HubRepo(Table):
    """A model on the Hugging Face hub, or a folder of that form."""

    repo_id: Annotated[str, AfterValidator(_repo_or_folder)]
    """owner/name on the hub, at most 64 bytes; or a folder, when it exists and no revision is
    given (of any length when it begins with / or ./ or ../)."""
    revision: Name | None = None
    """The commit, branch or tag on the hub."""


# In a bucket, and where it is kept here: no name leads out of its folder.
BUCKET = r"[a-z0-9_][a-z0-9._-]*"
_SEGMENT = r"(?!\.{1,2}(?:/|$))[^/\s\x00-\x1f\x7f]+"
PREFIX = rf"{_SEGMENT}(?:/{_SEGMENT})*/?"


def _bucket(value: str) -> str:
    if not re.fullmatch(BUCKET, value):
        raise wrong((), "a bucket's name: a-z, 0-9, - _ and . alone, and not gs://")
    return value


def _prefix(value: str) -> str:
    if value and not re.fullmatch(PREFIX, value):
        raise wrong((), "names with / between them, without spaces, . and ..")
    return value


class GcsRepo(Table):
    """A model in a bucket of Google Cloud Storage."""

    bucket: Annotated[Name, AfterValidator(_bucket)]
    """The bucket, at most 64 bytes."""
    prefix: Annotated[text(NAME_BYTES, empty=True), AfterValidator(_prefix)] | None = None
    """The folder in the bucket."""
    generation: Annotated[int, Field(ge=1, le=2**63 - 1)] | None = None
    """Of its manifest.json, which names all others; absent is the newest. Not a key of Psyche's."""


class Checkpoint(Variant):
    """What training starts from."""

    where = "model.LLM.checkpoint"


class CheckpointEphemeral(Checkpoint):
    """Nothing that is kept."""


class CheckpointDummy(Checkpoint):
    """Nothing, under a name; for tests."""

    repo_id: text(NAME_BYTES, empty=True)
    """Any name, or none."""
    revision: Name | None = None
    """Any revision."""


class CheckpointHub(Checkpoint, HubRepo):
    """A model on the Hugging Face hub, or a folder of that form."""


class CheckpointP2P(Checkpoint, HubRepo):
    """The params that other peers have; the config from the hub."""


class CheckpointGcs(Checkpoint, GcsRepo):
    """A model in a bucket of Google Cloud Storage."""


class CheckpointP2PGcs(Checkpoint, GcsRepo):
    """The params that other peers have; the config from a bucket."""


class CheckpointInit(Checkpoint):
    """Fresh weights."""

    config: dict[str, JsonValue]
    """The model, in the words of a Hugging Face config.json."""
    seed: U32
    """Of the random initial weights."""


class CheckpointRun(Checkpoint):
    """The final state of an earlier run, its optimizer included."""

    newtype = "key"
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    """The earlier run's key."""


# ---- lr_schedule ----


class Schedule(Variant):
    """The learning rate by step. Up to warmup_steps it rises linearly, then it is the variant's."""

    where = "model.LLM.lr_schedule"

    base_lr: Rate
    """The learning rate at the end of the warm-up."""
    warmup_init_lr: Rate
    """The learning rate at step 0; the first step trained is step 1."""
    warmup_steps: U32
    """Steps of the warm-up; 0 is none."""


class Decaying(Schedule):
    """A schedule that ends at a learning rate of its own."""

    total_steps: U32
    """The step at which final_lr is reached; it stays there."""
    final_lr: Rate
    """The learning rate at the end."""

    @model_validator(mode="after")
    def _there_is_a_decay(self) -> "Decaying":
        if self.total_steps <= self.warmup_steps:
            raise wrong("total_steps", f"more than warmup_steps ({self.warmup_steps})")
        return self


class ScheduleConstant(Schedule):
    """base_lr."""


class ScheduleLinear(Decaying):
    """A straight line from base_lr to final_lr."""


class ScheduleCosine(Decaying):
    """Half a cosine from base_lr to final_lr. (Psyche's rises again after total_steps.)"""


class ScheduleWarmupStableDecay(Schedule):
    """base_lr for a while, half a cosine to one learning rate, a straight line to another."""

    stable_steps: U32
    """Steps at base_lr after the warm-up."""
    cosine_decay_steps: U32
    """Steps of the half cosine."""
    cosine_decay_final_lr: Rate
    """The learning rate at the half cosine's end."""
    linear_decay_steps: U32
    """Steps of the straight line."""
    linear_decay_final_lr: Rate
    """The learning rate at the straight line's end, and after it."""

    @model_validator(mode="after")
    def _rates_fall(self) -> "ScheduleWarmupStableDecay":
        if self.cosine_decay_final_lr > self.base_lr:
            raise wrong("cosine_decay_final_lr", f"at most base_lr ({self.base_lr})")
        if self.linear_decay_final_lr > self.cosine_decay_final_lr:
            most = self.cosine_decay_final_lr
            raise wrong("linear_decay_final_lr", f"at most cosine_decay_final_lr ({most})")
        return self


# ---- optimizer ----


class Optimizer(Variant):
    """How gradients become updates, and what peers send each other."""

    where = "model.LLM.optimizer"


class OptimizerDummy(Optimizer):
    """None at all, for tests."""


class Dense(Optimizer):
    """Plain data parallelism: each peer sends its whole gradient."""

    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], ...],
        Field(min_length=2, max_length=2),
        AsTuple,
    ]
    """Decay rates of the two moments, [b1, b2]."""
    weight_decay: Rate
    """Times the learning rate: the fraction of each weight removed in a step."""
    eps: Rate
    """Added to the root of the second moment."""
    clip_grad_norm: Rate | None = None
    """Largest global L2 norm of a gradient; absent or 0 is no clipping."""


class OptimizerAdamW(Dense):
    """AdamW on the mean of all peers' gradients: the dense baseline."""


class OptimizerMuon(Dense):
    """Muon for the matrices of layers, AdamW for the rest, on the mean of all peers' gradients."""

    momentum: Annotated[float, Field(ge=0, lt=1)]
    """Nesterov's, of the matrices of layers."""
    step_scale: dict[str, Rate] = {}
    """Factor of a group's steps; 1 where it is not named. A group is a top-level name of the
    params: embed, layers, norm or lm_head."""


class Compressing(Optimizer):
    """Each peer sends the largest DCT coefficients of its momentum."""

    clip_grad_norm: Rate | None = None
    """Largest global L2 norm of a peer's gradient; absent or 0 is no clipping."""
    weight_decay: Rate | None = None
    """Times the learning rate: the fraction of each weight removed in a step; absent is 0."""
    compression_decay: Fraction
    """What is kept of the momentum `delta` from step to step, 0 to 1."""
    compression_topk: Annotated[U16, Field(ge=1)]
    """Coefficients sent of each block."""
    compression_chunk: Annotated[U16, Field(ge=1)]
    """Side of a block: the largest divisor of each dimension up to this."""
    quantize_1bit: bool
    """Send only the signs of the coefficients."""


class OptimizerDistro(Compressing):
    """DisTrO: each peer sends the largest DCT coefficients of its momentum."""


class OptimizerAdaDistro(Compressing):
    """DisTrO with what its papers do not do; each key's default is their way.

    A group is a top-level name of the params: embed, layers, norm or lm_head.
    """

    second_moment_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Of the factored second moment whose root divides a peer's gradient; absent: no division."""
    update: Literal["sign", "rms", "orthogonal"] = "sign"
    """What the decoded mean becomes: its sign, itself divided by its root mean square, or, in the
    matrices of layers, the nearest orthogonal matrix."""
    step_scale: dict[str, Rate] = {}
    """Factor of a group's steps; 1 where it is not named."""
    topk_of: dict[str, Annotated[U16, Field(ge=1)]] = {}
    """A group's own compression_topk."""
    untransformed: Annotated[tuple[str, ...], AsTuple] = ()
    """Groups whose elements are sent themselves, not the coefficients of their DCT."""
    removed: Fraction = 1.0
    """Share of what was sent that leaves the momentum."""


# ---- the types of the fields that hold them ----

AnyCheckpoint = one_of(
    CheckpointEphemeral,
    CheckpointDummy,
    CheckpointHub,
    CheckpointP2P,
    CheckpointGcs,
    CheckpointP2PGcs,
    CheckpointInit,
    CheckpointRun,
)
AnySchedule = one_of(ScheduleConstant, ScheduleLinear, ScheduleCosine, ScheduleWarmupStableDecay)
AnyOptimizer = one_of(
    OptimizerDummy, OptimizerAdamW, OptimizerMuon, OptimizerDistro, OptimizerAdaDistro
)
