"""Peers that take local steps between two exchanges; federated averaging, the plainest of them.

In the mean peers count by what they trained on, as in the paper of federated averaging.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from lockstep.methods.card import MEASURED, Card, OptimizerVariant, Setting, stated
from lockstep.methods.dense import ADAMW, ADAMW_20M, AnyDense
from lockstep.tables.table import Count, Decay, Fraction, wrong
from lockstep.tables.variant import variant_name

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer


class LocalSteps(OptimizerVariant):
    """A method of local steps; then each peer sends its pseudogradient, shared params minus own."""

    inner_steps: Count
    """Local steps of a peer in a round, each on an equal share of its sequences; peers x
    inner_steps must divide the sequences of every round. The learning rate follows its schedule
    within a round."""
    inner: AnyDense
    """Optimizer of the local steps, with its table; it sees only the gradients of its own peer."""

    @property
    def parts(self) -> dict[str, OptimizerVariant]:
        return {**super().parts, f"{variant_name(self)}.inner.{self.inner.tag()}": self.inner}

    @property
    def steps_of_a_round(self) -> int:
        return self.inner_steps

    def inner_optimizer(self, setting: Setting) -> "Optimizer":
        """Return the inner optimizer, which takes a method's local steps."""
        return self.inner.build(setting.alone)


class OuterSteps(LocalSteps):
    """A method of local steps whose mean pseudogradient is the gradient of an outer SGD."""

    outer_learning_rate: Annotated[float, Field(gt=0)]
    """Learning rate of the outer step, the same in every round; 0.7 in DiLoCo."""
    outer_momentum: Decay
    """Decay of the outer momentum from one outer step to the next; 0.9 in DiLoCo, 0 means none."""
    nesterov: bool
    """Whether the outer momentum is Nesterov's, as in DiLoCo."""

    @model_validator(mode="after")
    def _nesterov_has_outer_momentum(self) -> "OuterSteps":
        if self.nesterov and not self.outer_momentum:
            raise wrong("nesterov", "false with outer_momentum = 0")
        return self

    def outer_sgd(self, setting: Setting) -> "Optimizer":
        """Return the outer SGD of a method with local steps."""
        from lockstep.optim.local.local_steps import outer_sgd

        return outer_sgd(
            self.outer_learning_rate,
            momentum=self.outer_momentum,
            nesterov=self.nesterov,
            aggregate=setting.aggregate,
        )


Quantize = Literal["bfloat16", "float16", "int8", "int4", "qsgd8", "qsgd4", "two_bit", "sign"]


class Rounded(LocalSteps):
    """A method of local steps whose pseudogradients can be rounded before they are sent."""

    quantize: Quantize | None = None
    """Number format of the pseudogradients that peers send; float32 by default. Each block has a
    scale or magnitudes of its own. bfloat16: 16 bits, 8 of them for the exponent. float16: 16 bits,
    5 of them for the exponent. int8: integers times a scale. int4: the same in 4 bits. qsgd8:
    integers, rounded at random so that they are right on average. qsgd4: the same in 4 bits.
    two_bit: signs, times one of two magnitudes. sign: signs, times one magnitude."""
    quantize_block: Count | None = None
    """Number of elements in a block, whose scale takes 4 bytes, or 8 with two_bit. 256 is usual."""
    error_feedback: Fraction | None = None
    """Share of what rounding left out that a peer adds to its next message, 0 to 1; by default 0.
    two_bit and sign need it; qsgd8 and qsgd4 cannot have it."""

    @model_validator(mode="after")
    def _quantize_has_what_it_needs(self) -> "Rounded":
        kind, block, feedback = self.quantize, self.quantize_block, self.error_feedback
        in_blocks = kind not in (None, "bfloat16", "float16")
        if in_blocks and block is None:
            raise wrong("quantize", "quantize_block to be set too, the elements of a block")
        if block is not None and not in_blocks:
            text = "no quantize_block: only int, qsgd, two_bit and sign have it"
            raise wrong("quantize_block", text)
        if kind in ("two_bit", "sign") and not feedback:
            raise wrong("quantize", "error_feedback above 0 too, or the rest is lost")
        if feedback and kind is None:
            text = "no error_feedback without quantize, since nothing is rounded"
            raise wrong("error_feedback", text)
        if feedback and kind in ("qsgd8", "qsgd4"):
            text = f"none with quantize = {kind}, whose errors can grow when fed back"
            raise wrong("error_feedback", text)
        return self

    @property
    def is_rounded(self) -> bool:
        return self.quantize is not None

    def rounded(self, outer: "Optimizer") -> "Optimizer":
        """Return a method's outer optimizer with messages in the number format of `quantize`."""
        if not self.quantize:
            return outer
        import jax.numpy as jnp

        from lockstep.optim.quantize import QSGD, Half, Integers, Levels, quantized

        block: Any = self.quantize_block
        quantizers = {
            "bfloat16": lambda: Half(jnp.bfloat16),
            "float16": lambda: Half(jnp.float16),
            "int8": lambda: Integers(8, block),
            "int4": lambda: Integers(4, block),
            "qsgd8": lambda: QSGD(8, block),
            "qsgd4": lambda: QSGD(4, block),
            "two_bit": lambda: Levels(2, block),
            "sign": lambda: Levels(1, block),
        }
        return quantized(outer, quantizers[self.quantize](), self.error_feedback or 0.0)


class OptimizerFedAvg(LocalSteps):
    """Federated averaging: local steps, and then the mean of all peers' params."""

    def build(self, setting: Setting) -> "Optimizer":
        from lockstep.optim.local.local_steps import fedavg

        inner = self.inner_optimizer(setting)
        return fedavg(inner, inner_steps=self.inner_steps, aggregate=setting.aggregate)


LOCAL: dict[str, Any] = {"inner_steps": 10, "inner": {"AdamW": ADAMW}}
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.5, "nesterov": True}

CARDS = (Card("fedavg", OptimizerFedAvg, LOCAL, MEASURED, stated(MEASURED, 3e-3, ADAMW_20M)),)
