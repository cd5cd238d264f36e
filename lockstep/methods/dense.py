"""AdamW, Muon and SGD on the mean of all peers' gradients.

Peers count by their sequences; in `simulate` by what counts in their losses.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from lockstep.methods.card import (
    LARGER,
    MEASURED,
    ByGroup,
    Card,
    OptimizerVariant,
    Setting,
    StatedRate,
    stated,
)
from lockstep.tables.table import AsTuple, Decay, NotNegative, wrong
from lockstep.tables.variant import one_of

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer


class OptimizerDummy(OptimizerVariant):
    """No optimizer, for tests."""


class Dense(OptimizerVariant):
    """A method of plain data parallelism: each peer sends its whole gradient."""


class Moments(Dense, ByGroup):
    """A dense method with Adam's moments, of the mean of all peers' whole gradients."""

    betas: Annotated[tuple[Decay, ...], Field(min_length=2, max_length=2), AsTuple]
    """Decay rates of the first and second moment, [b1, b2]."""
    weight_decay: NotNegative
    """Weight decay: each step removes this times the learning rate, as a share of each weight."""
    eps: NotNegative
    """Term added to the root of the second moment, for stability."""
    clip_grad_norm: NotNegative | None = None
    """Maximum global L2 norm of the gradient; 0 or absent means no clipping."""


class OptimizerAdamW(Moments):
    """AdamW on the mean of all peers' gradients: the dense baseline."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.dense import adamw

        return adamw(setting.learning_rate, **dict(self), aggregate=setting.aggregate)


class OptimizerMuon(Moments):
    """Muon for the matrices in layers, AdamW for the rest, on the mean of all peers' gradients."""

    momentum: Decay
    """Decay of the Nesterov momentum of the matrices in layers."""

    @property
    def needs_layers(self) -> bool:
        return True

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.dense import muon

        options = {"stacked": setting.stacked, "aggregate": setting.aggregate}
        return muon(setting.learning_rate, **dict(self), **options)


class OptimizerSGD(Dense, ByGroup):
    """SGD on the mean of all peers' gradients."""

    momentum: Decay
    """Decay of the momentum; 0 means no momentum."""
    nesterov: bool
    """Whether the momentum is Nesterov's."""
    weight_decay: NotNegative
    """Weight decay: each step removes this times the learning rate, as a share of each weight."""
    clip_grad_norm: NotNegative | None = None
    """Maximum global L2 norm of the gradient; 0 or absent means no clipping."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "OptimizerSGD":
        if self.nesterov and not self.momentum:
            raise wrong("nesterov", "false with momentum = 0")
        return self

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.dense import sgd

        return sgd(setting.learning_rate, **dict(self), aggregate=setting.aggregate)


AnyDense = one_of(Dense)

ADAMW = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad_norm": 1.0}
ADAMW_20M = StatedRate(20_000_000, 4e-4, "params/fineweb-10bt.toml")
_FILE = "params/adamw.toml"
CARDS = (
    Card("adamw", OptimizerAdamW, ADAMW, _FILE, stated(_FILE, 1.5e-3, ADAMW_20M)),
    Card(
        "muon",
        OptimizerMuon,
        ADAMW | {"momentum": 0.95, "step_scale": {"layers": 0.075, "lm_head": 2.0}},
        MEASURED,
        stated(MEASURED, 3.2e-2, StatedRate(LARGER, 1.6e-2, MEASURED)),
    ),
    Card(
        "sgd",
        OptimizerSGD,
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
        MEASURED,
        stated(MEASURED, 0.2),
    ),
)
