"""DiLoCo and Streaming DiLoCo.

The cards' values are for runs of a few hundred rounds; the papers train for far longer:
  DiLoCo (https://arxiv.org/abs/2311.08105): inner_steps 500, outer_momentum 0.9
  Streaming DiLoCo (https://arxiv.org/abs/2501.18512): fragments of three layers,
    outer_learning_rate 0.4, outer_momentum 0.9; params/paper/streaming-diloco-35m.toml
The papers take the plain mean over peers; here peers count by what they trained on.
In Python, {"DiLoCo": {"inner_steps": 500, "outer_momentum": 0.9}} is the paper's over the card's.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from lockstep.methods.card import Card, Setting, StatedRate, stated
from lockstep.methods.dense import ADAMW_20M
from lockstep.methods.local_steps import LOCAL, OUTER, OuterSteps, Rounded
from lockstep.tables.table import Count, Decay, wrong

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer


class OptimizerDiLoCo(Rounded, OuterSteps):
    """DiLoCo: local steps; the mean of the pseudogradients is the gradient of an outer SGD."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.local_steps import diloco

        outer = self.rounded(self.outer_sgd(setting))
        return diloco(self.inner_optimizer(setting), outer, inner_steps=self.inner_steps)


class Fragmented(Rounded):
    """A method like Streaming DiLoCo: one fragment of the params a round, adopted later."""

    inner_steps: Count
    """Local steps of a peer between two exchanges of a fragment, a multiple of `fragments`; a round
    has inner_steps / fragments of them, and that number times the peers must divide the sequences
    of every round. The learning rate follows its schedule within a round."""
    fragments: Count
    """Number of fragments of the params, one of which is exchanged in each round; the bytes of a
    round are proportional to 1 / fragments."""
    delay: Annotated[int, Field(ge=0)]
    """Local steps into the next round after which a peer adopts the exchanged fragment; fewer than
    the local steps of a round."""

    @model_validator(mode="after")
    def _fragments_fit(self) -> "Fragmented":
        if self.inner_steps % self.fragments:
            raise wrong("inner_steps", f"a multiple of the {self.fragments} fragments")
        if self.delay >= self.steps_of_a_round:
            steps = f"{self.steps_of_a_round} (inner_steps / fragments)"
            raise wrong("delay", f"a number below the local steps of a round, {steps}")
        return self

    @property
    def steps_of_a_round(self) -> int:
        return self.inner_steps // self.fragments


class OptimizerStreamingDiLoCo(Fragmented, OuterSteps):
    """Streaming DiLoCo: in each round DiLoCo on one fragment of the params, adopted later."""

    mixing: Decay
    """Share of its own params that a peer keeps when it adopts a fragment; 0.5 in the paper, 0
    overwrites them."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.streaming import streaming_diloco

        return streaming_diloco(
            self.inner_optimizer(setting),
            self.rounded(self.outer_sgd(setting)),
            inner_steps=self.inner_steps,
            fragments=self.fragments,
            delay=self.delay,
            mixing=self.mixing,
        )


_DILOCO, _STREAMING = "params/diloco.toml", "params/streaming-diloco.toml"
_PAPER = StatedRate(35_000_000, 1e-3, "params/paper/streaming-diloco-35m.toml")
FRAGMENTS = {"fragments": 2, "delay": 1}
CARDS = (
    Card("diloco", OptimizerDiLoCo, LOCAL | OUTER, _DILOCO, stated(_DILOCO, 1.5e-3, ADAMW_20M)),
    Card(
        "streaming-diloco",
        OptimizerStreamingDiLoCo,
        LOCAL | OUTER | FRAGMENTS | {"mixing": 0.5},
        _STREAMING,
        stated(_STREAMING, 3e-3, _PAPER),
    ),
)
