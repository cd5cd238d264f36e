"""`model.LLM.optimizer.DecoupledDiLoCo.outer`: the outer step of Decoupled DiLoCo."""

from typing import Annotated

from pydantic import Field

from lockstep.tables.table import AsTuple, Count, Decay, Fraction, NotNegative
from lockstep.tables.variant import Variant, one_of


class OuterVariant(Variant):
    """How the merged pseudogradients of Decoupled DiLoCo become a step of the shared params."""

    where = "model.LLM.optimizer.DecoupledDiLoCo.outer"

    learning_rate: Annotated[float, Field(gt=0)]
    """Learning rate of the outer step, the same in every round."""


class OuterNesterov(OuterVariant):
    """SGD with Nesterov's momentum, as in DiLoCo; it treats old messages like new ones."""

    momentum: Decay
    """Decay of the momentum from one outer step to the next; 0 means no momentum."""


class OuterDelayedNesterov(OuterVariant):
    """SGD whose Nesterov momentum acts, and changes, only once in several merges."""

    momentum: Decay
    """Decay of the momentum from one of its changes to the next."""
    every: Count
    """Merges from one change of the momentum to the next; each moves params 1 / every as far."""


class OuterCGAD(OuterVariant):
    """Adam on pseudogradients that count less the older they are (Cosine-Gated Adam-Decay)."""

    betas: Annotated[tuple[Decay, ...], Field(min_length=2, max_length=2), AsTuple]
    """Decay rates of the first and second moment, [b1, b2]."""
    eps: NotNegative
    """Term added to the root of the second moment, for stability."""
    alpha: NotNegative
    """Decay of a message's weight per version by which its fragment has moved on."""
    cutoff: Annotated[float, Field(gt=0)]
    """Age, in versions of its fragment, from which on a message counts for nothing."""


class OuterHeLoCo(OuterVariant):
    """SGD with Nesterov's momentum, on pseudogradients that are turned towards the momentum."""

    momentum: Decay
    """Decay of the momentum from one outer step to the next."""
    keep: Fraction
    """Cosine with the momentum from which on a pseudogradient is left as it is, 0 to 1."""
    shrink: NotNegative
    """How much of what points against the momentum is removed, per -cosine."""
    shrink_most: Fraction
    """The largest share of it that is removed, 0 to 1."""
    turn: NotNegative
    """How far a pseudogradient with a cosine from 0 to `keep` is turned, per 1 - cosine."""
    trust: NotNegative
    """Times the norm of the momentum at which a pseudogradient is corrected half as far; a shorter
    one is corrected less."""


AnyOuter = one_of(OuterVariant)
