"""Decoupled DiLoCo: rounds that close without the peers that are late.

The card's outer step is half as long as the paper's, for few rounds; its learning_rate = 0.7 and
momentum = 0.9 are one argument away: {"DecoupledDiLoCo": {"outer": {"Nesterov": {...}}}}.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from lockstep.methods.card import Card, Misfits, Setting, Surroundings, stated
from lockstep.methods.dense import ADAMW_20M
from lockstep.methods.diloco import FRAGMENTS, Fragmented
from lockstep.methods.local_steps import LOCAL
from lockstep.protocol.closing import Closing, QuorumClosing, steps_of
from lockstep.tables.table import AsTuple, Count, Decay, Fraction, NotNegative, wrong
from lockstep.tables.variant import Variant, one_of

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer


COUNTS_EACH_ONCE = ("median", "trimmed_mean")  # rules without weights, of tokens and of age


class OuterVariant(Variant):
    """How the merged pseudogradients of Decoupled DiLoCo become a step of the shared params."""

    where = "model.LLM.optimizer.DecoupledDiLoCo.outer"

    learning_rate: Annotated[float, Field(gt=0)]
    """Learning rate of the outer step, the same in every round."""

    def build(self, setting: Setting) -> "Optimizer":
        """Return the outer optimizer of Decoupled DiLoCo."""
        raise NotImplementedError


class OuterNesterov(OuterVariant):
    """SGD with Nesterov's momentum, as in DiLoCo; it treats old messages like new ones."""

    momentum: Decay
    """Decay of the momentum from one outer step to the next; 0 means no momentum."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.local_steps import outer_sgd

        nesterov = self.momentum > 0
        return outer_sgd(**dict(self), nesterov=nesterov, aggregate=setting.aggregate)


class OuterDelayedNesterov(OuterVariant):
    """SGD whose Nesterov momentum acts, and changes, only once in several merges."""

    momentum: Decay
    """Decay of the momentum from one of its changes to the next."""
    every: Count
    """Number of merges from one change of the momentum to the next; each merge moves the params 1 /
    every as far."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.outer_steps import delayed_nesterov

        return delayed_nesterov(**dict(self), aggregate=setting.aggregate)


class OuterCGAD(OuterVariant):
    """Adam on pseudogradients whose weights fall with their age (Cosine-Gated Adam-Decay)."""

    betas: Annotated[tuple[Decay, ...], Field(min_length=2, max_length=2), AsTuple]
    """Decay rates of the first and second moment, [b1, b2]."""
    eps: NotNegative
    """Term added to the root of the second moment, for stability."""
    alpha: NotNegative
    """Decay of a message's weight for each version by which its fragment has moved on since."""
    cutoff: Annotated[float, Field(gt=0)]
    """Age, in versions of its fragment, from which on a message has no weight."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.outer_steps import cgad

        return cgad(**dict(self), aggregate=setting.aggregate)


class OuterHeLoCo(OuterVariant):
    """SGD with Nesterov's momentum, on pseudogradients that are turned towards the momentum."""

    momentum: Decay
    """Decay of the momentum from one outer step to the next."""
    keep: Fraction
    """Cosine with the momentum from which on a pseudogradient is not changed, 0 to 1."""
    shrink: NotNegative
    """How much of the part that points against the momentum is removed, per -cosine."""
    shrink_most: Fraction
    """Largest share of that part that is removed, 0 to 1."""
    turn: NotNegative
    """How far a pseudogradient with a cosine from 0 to `keep` is turned, per 1 - cosine."""
    trust: NotNegative
    """Norm at which a pseudogradient is corrected half as far, as a multiple of the momentum's
    norm; a shorter one is corrected less."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.outer_steps import heloco

        return heloco(**dict(self), aggregate=setting.aggregate)


AnyOuter = one_of(OuterVariant)


class OptimizerDecoupledDiLoCo(Fragmented):
    """Decoupled DiLoCo: rounds close without late peers, whose messages are merged later.

    A peer with fewer links.tokens_per_second takes fewer local steps in a round. A late message
    travels on and is merged when it has arrived; meanwhile its peer goes on training.
    """

    paced = True

    adopt: Literal["overwrite", "blend", "carry"]
    """How a peer adopts a fragment. overwrite: its own params are lost. blend: it keeps a share of
    them, `mixing`. carry: it keeps those of its local steps that are in no message yet."""
    mixing: Decay | None = None
    """Share of its own params that a peer keeps with adopt = "blend", which needs it."""
    quorum: Count
    """Number of messages of the round at which it begins to close, at most peers.count."""
    grace_seconds: NotNegative
    """Simulated seconds that a round then waits for more messages; config.max_round_train_time
    limits both waits. With 0 it waits only while peers go on training during the exchange
    (`delay`), which costs no time. A round that ends with a snapshot (witness.snapshot_every) waits
    for all peers, as other optimizers' rounds do, so that nothing travels on."""
    max_age: Annotated[int, Field(ge=0)]
    """Number of later exchanges of its fragment in which a late message may still be merged; 0
    drops late messages. The sequences of a dropped message are assigned again."""
    outer: AnyOuter
    """Outer step, with its table."""

    @model_validator(mode="after")
    def _blend_has_mixing(self) -> "OptimizerDecoupledDiLoCo":
        if self.adopt == "blend" and self.mixing is None:
            raise wrong("adopt", "mixing to be set with blend, the share that a peer keeps")
        if self.adopt != "blend" and self.mixing is not None:
            raise wrong("mixing", f"none with adopt = {self.adopt}, only with blend")
        return self

    def needs(self, run: Surroundings) -> Misfits:
        name, misfits = self.tag(), []
        if self.quorum > run.peers:
            key = f"model.LLM.optimizer.{name}.quorum"
            misfits += [(key, f"at most the number of peers ({run.peers})")]
        if run.links.clock != "simulated":
            misfits += [("links.clock", f"simulated with {name}, whose rounds close by it")]
        if run.aggregation in COUNTS_EACH_ONCE:
            text = f"another rule with {name}: {run.aggregation} takes old and short messages for "
            misfits += [("peers.aggregation", f"{text}others, as mean and rda do not")]
        if run.aggregation == "multi_krum" and self.max_age:  # a liar would be its own neighbour
            text = f"another rule with {name}, since a round may merge several messages of one peer"
            misfits += [("peers.aggregation", f"{text} with max_age = {self.max_age}")]
        least = 2 * (run.liars or 0) + 3  # of fewer messages, as of one, liars may be the nearest
        if run.aggregation == "multi_krum" and self.quorum < least:
            text = f"at least {least} with multi_krum and liars = {run.liars}"
            misfits += [(f"model.LLM.optimizer.{name}.quorum", text)]
        if run.layout != "each":
            misfits += [("peers.layout", f"each with {name}: not all peers train in every round")]
        if run.verification_percent:
            text = f"0 with {name}: a round does not wait until a step was taken again"
            misfits += [("config.verification_percent", text)]
        if run.links.topology == "ring":
            text = f"broadcast or hub with {name}: around a ring all messages arrive together"
            misfits += [("links.topology", text)]
        return misfits

    def closing(
        self, common: Closing, speeds: Sequence[float], *, settle_every: int, last: int
    ) -> Closing:
        return QuorumClosing(
            **vars(common),
            quorum=self.quorum,
            grace_seconds=self.grace_seconds,
            max_age=self.max_age,
            fragments=self.fragments,
            rows=common.most_rows // (len(speeds) * self.steps_of_a_round),
            steps=steps_of(speeds, self.steps_of_a_round),
            settle_every=settle_every,
            last=last,
        )

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.streaming import decoupled_diloco

        return decoupled_diloco(
            self.inner_optimizer(setting),
            self.rounded(self.outer.build(setting)),
            inner_steps=self.inner_steps,
            fragments=self.fragments,
            delay=self.delay,
            adopt=self.adopt,
            mixing=self.mixing or 0.0,
        )


_FILE = "params/decoupled-diloco.toml"
_PACE = {"adopt": "overwrite", "quorum": 1, "grace_seconds": 1.0, "max_age": 2}
_OUTER = {"outer": {"Nesterov": {"learning_rate": 0.35, "momentum": 0.5}}}
CARDS = (
    Card(
        "decoupled-diloco",
        OptimizerDecoupledDiLoCo,
        LOCAL | FRAGMENTS | _PACE | _OUTER,
        _FILE,
        stated(_FILE, 3e-3, ADAMW_20M),
    ),
)
