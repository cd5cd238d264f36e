"""`[model.LLM]` optimizer: how gradients become updates. Each variant is a class.

A class is named after its enum and Psyche's variant, or Lockstep's own: `OptimizerMuon` and
`OptimizerAdaDistro`. `pipeline/programs/optimizers.py` builds the optimizer of each.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from pipeline.runfile.serde_enum import Variant, one_of
from pipeline.runfile.table import U16, AsTuple

Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class OptimizerVariant(Variant):
    """How gradients become updates, and what peers send each other."""

    where = "model.LLM.optimizer"
    by_group: ClassVar[tuple[str, ...]] = ()
    """The fields that name groups, which are the top-level names of the params."""
    overlaps: ClassVar[bool] = False
    """Whether messages may travel while the next round is computed, [peers] overlap."""


class OptimizerDummy(OptimizerVariant):
    """Without any optimizer, for tests."""


class Dense(OptimizerVariant):
    """Plain data parallelism: each peer sends its whole gradient."""

    betas: Annotated[
        tuple[Annotated[float, Field(ge=0, lt=1)], ...],
        Field(min_length=2, max_length=2),
        AsTuple,
    ]
    """Decay of the first and second moment, [b1, b2]."""
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

    by_group = ("step_scale",)

    momentum: Annotated[float, Field(ge=0, lt=1)]
    """Decay of Nesterov's momentum of the matrices of layers."""
    step_scale: dict[str, Rate] = {}
    """Factor of a group's steps; 1 where it is not named. A group is a top-level name of the
    params: embed, layers, norm or lm_head."""


class Compressing(OptimizerVariant):
    """Each peer sends the largest DCT coefficients of its momentum."""

    overlaps = True

    clip_grad_norm: Rate | None = None
    """Largest global L2 norm of a peer's gradient; absent or 0 is no clipping."""
    weight_decay: Rate | None = None
    """Times the learning rate: the fraction of each weight removed in a step; absent is 0."""
    compression_decay: Fraction
    """Decay of the momentum `delta` per round, 0 to 1."""
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

    by_group = ("step_scale", "topk_of", "untransformed")

    second_moment_decay: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of the factored second moment whose root divides a peer's gradient; absent: no
    division."""
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


AnyOptimizer = one_of(OptimizerVariant)
