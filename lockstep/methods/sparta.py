"""SPARTA, and SPARTA with DiLoCo's outer steps.

The paper exchanges at most 0.5 % of the params in a round of one step; the cards' 10 and 5 % are
for runs of a few hundred rounds. In Python, {"SPARTA": {"share": 0.005}} is the paper's.
There peers count equally, here by what they trained on.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from lockstep.methods.card import Card, Setting, stated
from lockstep.methods.dense import ADAMW_20M
from lockstep.methods.local_steps import LOCAL, OUTER, LocalSteps, OuterSteps
from lockstep.tables.table import U32, Count

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer


class Places(LocalSteps):
    """A method like SPARTA: peers take the mean of a few elements of their params, at random."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Share of the params that is exchanged in a round; bytes are proportional to it. Params are
    measured and exported as of their last exchange: by share alone, on average 1 / share rounds ago
    with `selector` random, and about half of that with the others."""
    seed: U32
    """Seed of the choice of elements."""
    selector: Literal["random", "shuffled", "partitioned"] = "random"
    """How elements are chosen. random: anew in each round. shuffled: each has its turn once in
    about 1 / share rounds, in an order that is drawn once. partitioned: in an order that is drawn
    again whenever all have had their turn."""

    def sparta(self, setting: Setting) -> "Optimizer":
        """Return the optimizer SPARTA: the mean of a few elements of the params."""
        from lockstep.optim.local.sparta import sparta

        settings = {key: getattr(self, key) for key in Places.model_fields}
        settings["inner"] = self.inner_optimizer(setting)
        return sparta(**settings, aggregate=setting.aggregate)


class OptimizerSPARTA(Places):
    """SPARTA: local steps, and then the mean of a few elements of all peers' params."""

    def build(self, setting: Setting) -> "Optimizer":
        return self.sparta(setting)


class OptimizerSPARTADiLoCo(OuterSteps, Places):
    """SPARTA and, in each round, an outer step of DiLoCo on one fragment of the params."""

    outer_every: Count
    """Rounds from one outer step of a param to its next, which is also the number of fragments.
    Bytes are proportional to share + 1 / outer_every."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.dense import sgd
        from lockstep.optim.local.sparta import sparta_diloco

        momentum, nesterov = self.outer_momentum, self.nesterov
        outer = sgd(self.outer_learning_rate, momentum=momentum, nesterov=nesterov)
        sparse, every = self.sparta(setting), self.outer_every
        return sparta_diloco(sparse, outer, outer_every=every, aggregate=setting.aggregate)


_SPARTA, _SPARTA_DILOCO = "params/sparta.toml", "params/sparta-diloco.toml"
_EVERY_STEP = LOCAL | {"inner_steps": 1, "seed": 0}
CARDS = (
    Card(
        "sparta",
        OptimizerSPARTA,
        _EVERY_STEP | {"share": 0.1},
        _SPARTA,
        stated(_SPARTA, 1.5e-3, ADAMW_20M),
    ),
    Card(
        "sparta-diloco",
        OptimizerSPARTADiLoCo,
        _EVERY_STEP | OUTER | {"share": 0.05, "outer_every": 20},
        _SPARTA_DILOCO,
        stated(_SPARTA_DILOCO, 1.5e-3, ADAMW_20M),
    ),
)
