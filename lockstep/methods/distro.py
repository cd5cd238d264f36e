"""DisTrO; DeMo, which is DisTrO with values instead of signs; and AdaDistro.

Each peer that sent a coefficient counts once, as in their papers. The cards clip gradients, which
DeMo's authors do not: {"demo": {"clip_grad_norm": 0.0}} is theirs.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from lockstep.methods.card import ByGroup, Card, OptimizerVariant, Setting, StatedRate, stated
from lockstep.methods.dense import LARGER_STEPS, MEASURED, STEP_SCALE
from lockstep.tables.table import U16, Decay, Fraction, NotNegative

if TYPE_CHECKING:
    from lockstep.optim.compressed.distro import CompressedMomentum
    from lockstep.optim.optimizer import Optimizer


class Compressing(OptimizerVariant, ByGroup):
    """A method of DisTrO's kind: each peer sends the largest DCT coefficients of its momentum."""

    overlaps = True
    sends = "coefficients"

    clip_grad_norm: NotNegative | None = None
    """Maximum global L2 norm of a peer's gradient; 0 or absent means no clipping."""
    weight_decay: NotNegative | None = None
    """Weight decay: each step removes this times the learning rate, as a share of each weight; by
    default 0."""
    compression_decay: Fraction
    """Decay of the momentum `delta` per round, 0 to 1."""
    compression_topk: Annotated[U16, Field(ge=1)]
    """Number of coefficients sent per block, at least 1."""
    compression_chunk: Annotated[U16, Field(ge=1)]
    """Maximum side of a block; each dimension is cut by its largest divisor up to this."""
    quantize_1bit: bool
    """Whether only the signs of the coefficients are sent."""
    skip_zero_blocks: bool | None = None
    """Whether a block that is all zero counts as not sent, so that a param without any gradient,
    such as that of an expert or a token that never occurs, does not change. By default such a block
    is sent: as in Psyche, with quantize_1bit zeros have the sign +, so that it changes in every
    round."""

    @property
    def is_signs(self) -> bool:
        return self.quantize_1bit

    @property
    def kept(self) -> int:
        return min(self.compression_topk, self.compression_chunk)

    def momentum(self, setting: Setting, update: str = "sign") -> "CompressedMomentum":
        """Return DisTrO's momentum, what of it is sent, and the update that is made of the mean."""
        from lockstep.optim.compressed.compressor import Compressor
        from lockstep.optim.compressed.distro import CompressedMomentum
        from lockstep.optim.directions import StepDirection

        return CompressedMomentum(
            setting.learning_rate,
            Compressor(
                topk=self.compression_topk,
                chunk=self.compression_chunk,
                quantize_1bit=self.quantize_1bit,
                stacked=setting.stacked,
                skip_zero_blocks=bool(self.skip_zero_blocks),
            ),
            compression_decay=self.compression_decay,
            weight_decay=self.weight_decay or 0.0,
            clip_grad_norm=self.clip_grad_norm,
            direction=StepDirection(update, self.step_scale, setting.stacked),
            aggregate=setting.aggregate,
        )


class OptimizerDistro(Compressing):
    """DisTrO: each peer sends the largest DCT coefficients of its momentum."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.compressed.distro import distro

        return distro(self.momentum(setting), setting.overlap)


class OptimizerAdaDistro(Compressing):
    """This project's own extension of DisTrO; with the defaults of its own keys it is DisTrO."""

    second_moment_decay: Decay | None = None
    """Decay of the factored second moment whose root divides a peer's gradient; by default,
    gradients are not divided."""
    update: Literal["sign", "orthogonal"] = "sign"
    """Update that is made from the decoded mean. sign: its sign. orthogonal: for the matrices in
    layers, the nearest orthogonal matrix."""

    @property
    def needs_layers(self) -> bool:
        return self.update == "orthogonal"

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.compressed.ada_distro import ada_distro
        from lockstep.optim.compressed.distro import distro

        momentum = self.momentum(setting, self.update)
        if self.second_moment_decay is None:
            return distro(momentum, setting.overlap)
        return ada_distro(momentum, self.second_moment_decay, setting.overlap)


_ADA_DISTRO = "params/ada-distro.toml"
_BLOCKS = {"compression_chunk": 64, "compression_topk": 32}
_DISTRO = _BLOCKS | {"clip_grad_norm": 1.0, "compression_decay": 0.999}
_FINEWEB = StatedRate(20_000_000, 4e-4, "params/fineweb-edu.toml")
_LARGE = StatedRate(1_200_000_000, 4e-4, "params/paper/distro-1.2b.toml")
_RATES = stated(MEASURED, 2e-3, _FINEWEB, _LARGE)  # of one step size; params/run.toml has others
_BY_GROUP = {"update": "orthogonal", "step_scale": STEP_SCALE}
_NORMALIZED = {"compression_decay": 0.95, "second_moment_decay": 0.95}
CARDS = (
    Card("distro", OptimizerDistro, _DISTRO | {"quantize_1bit": True}, MEASURED, _RATES),
    Card("demo", OptimizerDistro, _DISTRO | {"quantize_1bit": False}, MEASURED, _RATES),
    Card(
        "ada-distro",
        OptimizerAdaDistro,
        _BLOCKS | {"quantize_1bit": True} | _NORMALIZED | _BY_GROUP,
        _ADA_DISTRO,
        stated(_ADA_DISTRO, 3.2e-2, LARGER_STEPS),
    ),
)
