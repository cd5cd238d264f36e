"""SparseLoCo with the values of its paper, except inner_steps, which is 15 to 30 there.

There peers count equally, here by what they trained on.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lockstep.methods.card import Card, Setting, stated
from lockstep.methods.dense import ADAMW_20M
from lockstep.methods.local_steps import LOCAL, LocalSteps
from lockstep.tables.table import U16

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer


class OptimizerSparseLoCo(LocalSteps):
    """SparseLoCo: local steps; then the largest elements of the pseudogradients, in two bits."""

    sends = "elements"

    outer_learning_rate: Annotated[float, Field(gt=0)]
    """Learning rate of the outer step, the same in every round; 1 in SparseLoCo."""
    error_feedback: Annotated[float, Field(gt=0, le=1)]
    """Decay per round of the part that a peer has not sent yet, above 0, at most 1; 0.95 in
    SparseLoCo."""
    compression_topk: Annotated[U16, Field(ge=1)]
    """Number of elements sent per block, at least 1; 128 in SparseLoCo."""
    compression_chunk: Annotated[U16, Field(ge=1)]
    """Maximum side of a block; each dimension is cut by its largest divisor up to this. 64 in
    SparseLoCo, for blocks of 4,096."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.sparseloco import sparseloco

        return sparseloco(
            self.inner_optimizer(setting),
            inner_steps=self.inner_steps,
            outer_learning_rate=self.outer_learning_rate,
            error_feedback=self.error_feedback,
            topk=self.compression_topk,
            chunk=self.compression_chunk,
            stacked=setting.stacked,
            aggregate=setting.aggregate,
        )


_FILE = "params/sparseloco.toml"
_CHOSEN = {"error_feedback": 0.95, "compression_topk": 128, "compression_chunk": 64}
CARDS = (
    Card(
        "sparseloco",
        OptimizerSparseLoCo,
        LOCAL | {"outer_learning_rate": 1.0} | _CHOSEN,
        _FILE,
        stated(_FILE, 3e-3, ADAMW_20M),
    ),
)
