"""What a method is: a table of the run file, what it needs of a run, and a card that states values.

Reading a run file must stay light, so JAX is imported only where an optimizer is built.
"""

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.protocol.committee import trainers_of
from lockstep.tables.links import Links
from lockstep.tables.table import NotNegative, Table
from lockstep.tables.variant import Variant, variant_name, variants_of

if TYPE_CHECKING:
    from lockstep.optim.aggregation import AggregateFn
    from lockstep.optim.optimizer import Optimizer
    from lockstep.optim.schedules import LearningRate
    from lockstep.protocol.closing import Closing


class Setting(NamedTuple):
    """What a method's optimizer is built from beside its table.

    Attributes:
      learning_rate: A schedule of the step, counted from 1.
      overlap: Rounds that messages travel while the next ones are computed, 0 to 2.
      stacked: Top-level groups of the params whose leaves carry a leading layer axis.
      aggregation: Name of the rule by which the values that peers sent become one.
      liars: Peers that may lie, for a rule that needs their number.
    """

    learning_rate: "LearningRate"
    overlap: int = 0
    stacked: tuple[str, ...] = ()
    aggregation: str = "mean"
    liars: int = 0

    @property
    def aggregate(self) -> "AggregateFn":
        """The rule by which the values that a method's peers sent become one."""
        from lockstep.optim.aggregation import RULES

        return RULES[self.aggregation](self.liars)

    @property
    def alone(self) -> "Setting":
        """The setting of a method's local steps, which a peer takes by itself."""
        return self._replace(aggregation="mean", liars=0)


class Surroundings(NamedTuple):
    """What a method's run has, in the words of `[config]`, `[peers]` and `[links]`."""

    verification_percent: int
    peers: int
    aggregation: str
    liars: int | None
    layout: str
    links: Links

    @property
    def trainers(self) -> int:
        """The number of peers whose messages the method's run merges in a round."""
        return trainers_of(self.peers, self.verification_percent)


Misfits = list[tuple[str, str]]
"""Keys of a run file whose values do not fit, and what was expected of each."""


class OptimizerVariant(Variant):
    """How gradients become updates, and what peers send each other."""

    where = "model.LLM.optimizer"
    overlaps: ClassVar[bool] = False
    """Whether messages may travel while the next round is computed, [peers] overlap."""
    sends: ClassVar[Literal["arrays", "elements", "coefficients"]] = "arrays"
    """What a message holds: whole arrays; elements of a pseudogradient that its peer chose; or DCT
    coefficients that it chose, each of which is merged over the peers that sent it."""
    paced: ClassVar[bool] = False
    """Whether rounds close without the peers that are late, by `closing`."""

    @property
    def parts(self) -> dict[str, "OptimizerVariant"]:
        """The method's optimizer itself and those within it, by their full names in a run file."""
        return {variant_name(self): self}

    @property
    def steps_of_a_round(self) -> int:
        """Local steps that a peer takes in a round by this method."""
        return 1

    @property
    def is_signs(self) -> bool:
        """Whether the method's messages are signs, which have no size."""
        return False

    @property
    def kept(self) -> int:
        """Coefficients of a block that the method's messages name by index; 0 if they name none."""
        return 0

    @property
    def needs_layers(self) -> bool:
        """Whether the method steps otherwise for matrices of layers, which must be named then."""
        return False

    @property
    def is_rounded(self) -> bool:
        """Whether the method's messages are in a number format of their own, without a sum."""
        return False

    def needs(self, run: Surroundings) -> Misfits:
        """Return what of the rest of its run misfits the method; misfits.py has what all need."""
        return []

    def closing(
        self, common: "Closing", speeds: Sequence[float], *, settle_every: int, last: int
    ) -> "Closing":
        """Return what a method's rounds wait for: by default, as is `common`, for all messages.

        Peers train so many tokens per second. No message travels on from the `last` round, nor from
        any round that is a multiple of `settle_every`, unless that is 0.
        """
        return common

    def build(self, setting: Setting) -> "Optimizer":
        """Return the method's optimizer; `build` below checks first that it fits."""
        tags = [kind.tag() for kind in variants_of(OptimizerVariant) if "build" in vars(kind)]
        raise LockstepError(
            f"{variant_name(self)}: this release cannot train with it, expected "
            f"{self.where}.{', '.join(tags[:-1])} or {tags[-1]}"
        )


class ByGroup(Table):
    """An optimizer whose steps differ in size by group of the params."""

    step_scale: dict[str, NotNegative] = Field(default={}, exclude_if=lambda scale: not scale)
    """Step-size factor by group, of its weight decay too; 1 for groups that are not named. A group
    is a top-level name of the params: embed, layers, norm or lm_head."""


def build(table: OptimizerVariant, setting: Setting, groups: Collection[str]) -> "Optimizer":
    """Return the optimizer of `model.LLM.optimizer`; `groups` are all top-level groups of params.

    Raises:
      LockstepError: The variant has no optimizer, cannot overlap, or names an unknown group.
    """
    if setting.overlap and not table.overlaps:
        raise LockstepError(
            f"[peers] overlap = {setting.overlap}, expected 0 with {variant_name(table)}: its "
            "peers wait for all messages"
        )
    for name, part in table.parts.items():
        scale = part.step_scale if isinstance(part, ByGroup) else {}
        if unknown := [group for group in scale if group not in groups]:
            raise LockstepError(
                f"{name}.step_scale: {unknown[0]} is no top-level group of the model's params, "
                f"expected some of {', '.join(sorted(groups))}"
            )
    return table.build(setting)


# ---- Cards ----

MEASURED = "benchmarks/RESULTS.md"
SMALL, LARGER = 1_850_000, 5_000_000  # params of the models there


class StatedRate(NamedTuple):
    """A card's learning rate, the params of the model it is stated for, and the file saying so."""

    params: int
    rate: float
    file: str


class Card(NamedTuple):
    """A method by its name, with values that are stated somewhere.

    Attributes:
      name: What `simulate`, `lockstep new` and a comparison call it.
      table: Its kind of table in a run file.
      settings: The values of that table, tuned for models of this size rather than a paper's.
      file: Where these values are from.
      rates: Learning rates that are stated for it, from the smallest model to the largest.
    """

    name: str
    table: type[OptimizerVariant]
    settings: dict[str, Any]
    file: str
    rates: tuple[StatedRate, ...]

    @property
    def tag(self) -> str:
        """The name of the card's table in a run file."""
        return self.table.tag()

    @property
    def local_steps(self) -> int:
        """The card's local steps of a round."""
        return self.settings.get("inner_steps", 1) // self.settings.get("fragments", 1)

    @property
    def step_scale(self) -> dict[str, float]:
        """The card's step-size factors by group."""
        return self.settings.get("step_scale", {})

    def rate_for(self, params: int | None) -> StatedRate:
        """Return the card's rate for the size that is nearest, by ratio; None is the smallest."""
        return min(self.rates, key=lambda rate: abs(math.log(rate.params / (params or SMALL))))

    def for_groups(self, groups: Collection[str]) -> "Card":
        """Return the card without step sizes of groups that the model lacks, such as a head."""
        if not self.step_scale:
            return self
        scale = {name: x for name, x in self.step_scale.items() if name in groups}
        return self._replace(settings=self.settings | {"step_scale": scale})


def stated(file: str, rate: float, *more: StatedRate) -> tuple[StatedRate, ...]:
    """Return a card's rates: `rate` for the small model of RESULTS.md, and others."""
    return StatedRate(SMALL, rate, file), *more
