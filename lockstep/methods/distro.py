"""DisTrO; and DeMo, which is DisTrO with values instead of signs.

Each peer that sent a coefficient counts once, as in their papers. The cards clip gradients, which
DeMo's authors do not: {"demo": {"clip_grad_norm": 0.0}} is theirs.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lockstep.methods.card import (
    MEASURED,
    ByGroup,
    Card,
    OptimizerVariant,
    Setting,
    StatedRate,
    stated,
)
from lockstep.tables.table import U16, Fraction, NotNegative

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer


class OptimizerDistro(OptimizerVariant, ByGroup):
    """DisTrO: each peer sends the largest DCT coefficients of its momentum."""

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

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.compressed.compressor import Compressor
        from lockstep.optim.compressed.distro import CompressedMomentum, distro

        momentum = CompressedMomentum(
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
            step_scale=self.step_scale,
            aggregate=setting.aggregate,
        )
        return distro(momentum, setting.overlap)


_DISTRO = {
    "compression_chunk": 64,
    "compression_topk": 32,
    "clip_grad_norm": 1.0,
    "compression_decay": 0.999,
}
_FINEWEB = StatedRate(20_000_000, 4e-4, "params/fineweb-edu.toml")
_LARGE = StatedRate(1_200_000_000, 4e-4, "params/paper/distro-1.2b.toml")
_RATES = stated(MEASURED, 2e-3, _FINEWEB, _LARGE)  # of one step size; params/run.toml has others
CARDS = (
    Card("distro", OptimizerDistro, _DISTRO | {"quantize_1bit": True}, MEASURED, _RATES),
    Card("demo", OptimizerDistro, _DISTRO | {"quantize_1bit": False}, MEASURED, _RATES),
)
