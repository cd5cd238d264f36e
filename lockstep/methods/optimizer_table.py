"""`[model.LLM]` optimizer: how gradients become updates. Each variant is a class.

A class is named after its enum and Psyche's variant, or Lockstep's own: `OptimizerMuon` and
`OptimizerAdaDistro`. `lockstep/methods/build.py` builds the optimizer of each.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from lockstep.methods.outer_table import AnyOuter
from lockstep.tables.table import U16, U32, AsTuple, Count, Decay, Fraction, NotNegative, wrong
from lockstep.tables.variant import Variant, one_of, variant_name


class OptimizerVariant(Variant):
    """How gradients become updates, and what peers send each other."""

    where = "model.LLM.optimizer"
    by_group: ClassVar[tuple[str, ...]] = ()
    """The fields that name groups, which are the top-level names of the params."""
    overlaps: ClassVar[bool] = False
    """Whether messages may travel while the next round is computed, [peers] overlap."""

    @property
    def parts(self) -> dict[str, "OptimizerVariant"]:
        """The optimizer itself and those within it, by their full names in a run file."""
        return {variant_name(self): self}

    @property
    def steps_of_a_round(self) -> int:
        """Local steps that a peer takes in a round."""
        return 1


class OptimizerDummy(OptimizerVariant):
    """No optimizer, for tests."""


class Dense(OptimizerVariant):
    """Plain data parallelism: each peer sends its whole gradient."""


class Moments(Dense):
    """Adam's moments of the mean of all peers' gradients."""

    betas: Annotated[tuple[Decay, ...], Field(min_length=2, max_length=2), AsTuple]
    """Decay rates of the first and second moment, [b1, b2]."""
    weight_decay: NotNegative
    """Weight decay: its product with the learning rate is removed from each weight per step."""
    eps: NotNegative
    """Term added to the root of the second moment, for stability."""
    clip_grad_norm: NotNegative | None = None
    """Maximum global L2 norm of the gradient; 0 or absent is no clipping."""


class OptimizerAdamW(Moments):
    """AdamW on the mean of all peers' gradients: the dense baseline."""


class OptimizerMuon(Moments):
    """Muon for the matrices in layers, AdamW for the rest, on the mean of all peers' gradients."""

    by_group = ("step_scale",)

    momentum: Decay
    """Decay of the Nesterov momentum of the matrices in layers."""
    step_scale: dict[str, NotNegative] = {}
    """Step-size factor by group; 1 for groups that are not named. A group is a top-level name of
    the params: embed, layers, norm or lm_head."""


class OptimizerSGD(Dense):
    """SGD on the mean of all peers' gradients."""

    momentum: Decay
    """Decay of the momentum; 0 is no momentum."""
    nesterov: bool
    """Whether the momentum is Nesterov's."""
    weight_decay: NotNegative
    """Weight decay: its product with the learning rate is removed from each weight per step."""
    clip_grad_norm: NotNegative | None = None
    """Maximum global L2 norm of the gradient; 0 or absent is no clipping."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> "OptimizerSGD":
        if self.nesterov and not self.momentum:
            raise wrong("nesterov", "false with momentum = 0")
        return self


class OptimizerWorkload(Dense):
    """The optimizer of the workload, which takes all local steps of a round by itself."""


AnyDense = one_of(Dense)


class LocalSteps(OptimizerVariant):
    """Each peer takes local steps, then sends its pseudogradient: params of all minus its own."""

    inner_steps: Count
    """Local steps of a peer in a round, each on as many of its sequences; peers x inner_steps must
    divide the sequences of every round. The learning rate follows its schedule within a round."""
    inner: AnyDense
    """Optimizer of the local steps, with its table; it takes the gradients of its peer alone."""

    @property
    def parts(self) -> dict[str, OptimizerVariant]:
        """The optimizer itself and that of its local steps, by their full names in a run file."""
        return {**super().parts, f"{variant_name(self)}.inner.{self.inner.tag()}": self.inner}

    @property
    def steps_of_a_round(self) -> int:
        """Local steps that a peer takes in a round."""
        return self.inner_steps


class OuterSteps(LocalSteps):
    """The mean of the peers' pseudogradients is the gradient of an outer SGD."""

    outer_learning_rate: Annotated[float, Field(gt=0)]
    """Learning rate of the outer step, the same in every round; 0.7 in DiLoCo."""
    outer_momentum: Decay
    """Decay of the outer momentum from one outer step to the next; 0.9 in DiLoCo, 0 is none."""
    nesterov: bool
    """Whether the outer momentum is Nesterov's, as in DiLoCo."""

    @model_validator(mode="after")
    def _nesterov_has_outer_momentum(self) -> "OuterSteps":
        if self.nesterov and not self.outer_momentum:
            raise wrong("nesterov", "false with outer_momentum = 0")
        return self


Quantize = Literal["bfloat16", "float16", "int8", "int4", "qsgd8", "qsgd4", "two_bit", "sign"]


class Rounded(LocalSteps):
    """Pseudogradients that can be rounded before they are sent."""

    quantize: Quantize | None = None
    """Number format of the pseudogradients that peers send; float32 by default. Each block has a
    scale or magnitudes of its own. bfloat16: 16 bits, 8 of them for the exponent. float16: 16 bits,
    5 of them for the exponent. int8: integers times a scale. int4: the same in 4 bits. qsgd8:
    integers rounded at random, right on average. qsgd4: the same in 4 bits. two_bit: signs, times
    one of two magnitudes. sign: signs, times one magnitude."""
    quantize_block: Count | None = None
    """Elements of a block, whose scales take 4 bytes, with two_bit 8. 256 is usual."""
    error_feedback: Fraction | None = None
    """Share of what rounding left out that a peer adds to its next message, 0 to 1; by default 0.
    two_bit and sign need it; qsgd must have none."""

    @model_validator(mode="after")
    def _quantize_has_what_it_needs(self) -> "Rounded":
        kind, block, feedback = self.quantize, self.quantize_block, self.error_feedback
        in_blocks = kind not in (None, "bfloat16", "float16")
        if in_blocks and block is None:
            raise wrong("quantize", "quantize_block beside it, the elements of a block")
        if block is not None and not in_blocks:
            text = "no quantize_block: only int, qsgd, two_bit and sign have it"
            raise wrong("quantize_block", text)
        if kind in ("two_bit", "sign") and not feedback:
            raise wrong("quantize", "error_feedback above 0 beside it, or the rest is lost")
        if feedback and kind is None:
            text = "no error_feedback without quantize, since nothing is rounded"
            raise wrong("error_feedback", text)
        if feedback and kind in ("qsgd8", "qsgd4"):
            text = f"none with quantize = {kind}, whose errors can grow when fed back"
            raise wrong("error_feedback", text)
        return self


class OptimizerDiLoCo(Rounded, OuterSteps):
    """DiLoCo: local steps; the mean of the pseudogradients is the gradient of an outer SGD."""


class Fragmented(Rounded):
    """Pseudogradients of one fragment of the params in each round, adopted later."""

    inner_steps: Count
    """Local steps of a peer between two exchanges of a fragment, a multiple of `fragments`; a round
    has inner_steps / fragments of them, and peers times that must divide the sequences of every
    round. The learning rate follows its schedule within a round."""
    fragments: Count
    """Number of fragments of the params, one of which is exchanged in each round; bytes of a round
    are proportional to 1 / fragments."""
    delay: Annotated[int, Field(ge=0)]
    """Local steps into the next round after which a peer adopts the exchanged fragment; fewer than
    a round has."""

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
        """Local steps that a peer takes in a round."""
        return self.inner_steps // self.fragments


class OptimizerStreamingDiLoCo(Fragmented, OuterSteps):
    """Streaming DiLoCo: in each round DiLoCo of one fragment of the params, adopted later."""

    mixing: Decay
    """Share of its own params that a peer keeps then; 0.5 in the paper, 0 overwrites them."""


class OptimizerDecoupledDiLoCo(Fragmented):
    """Decoupled DiLoCo: rounds close without those that are late, whose messages are merged later.

    A peer that is slower by links.tokens_per_second takes fewer local steps in a round. What is
    late travels on and is merged when it has arrived; until then its peer is given no work.
    """

    adopt: Literal["overwrite", "blend", "carry"]
    """How a peer adopts a fragment. overwrite: its own params are lost. blend: it keeps a share of
    them, `mixing`. carry: it keeps those of its local steps that no message holds yet."""
    mixing: Decay | None = None
    """Share of its own params that a peer keeps with adopt = "blend", which needs it."""
    quorum: Count
    """Number of its own messages at which a round begins to close, at most peers.count."""
    grace_seconds: NotNegative
    """Simulated seconds that a round waits for others then; config.max_round_train_time bounds
    both. With 0 it waits only while peers train on beside the exchange (`delay`), which costs no
    time. After a round that ends with a snapshot (witness.snapshot_every) nothing travels on: it
    waits for all, as other optimizers' rounds do."""
    max_age: Annotated[int, Field(ge=0)]
    """Exchanges of its fragment after its own in which a message may still be merged; 0 drops what
    is late. The sequences of a dropped message are given out again."""
    outer: AnyOuter
    """Outer step, with its table."""

    @model_validator(mode="after")
    def _blend_has_mixing(self) -> "OptimizerDecoupledDiLoCo":
        if self.adopt == "blend" and self.mixing is None:
            raise wrong("adopt", "mixing beside blend, the share that a peer keeps")
        if self.adopt != "blend" and self.mixing is not None:
            raise wrong("mixing", f"none with adopt = {self.adopt}, only with blend")
        return self


class OptimizerSparseLoCo(LocalSteps):
    """SparseLoCo: local steps; then the largest elements of the pseudogradients, in two bits."""

    outer_learning_rate: Annotated[float, Field(gt=0)]
    """Learning rate of the outer step, the same in every round; 1 in SparseLoCo."""
    error_feedback: Annotated[float, Field(gt=0, le=1)]
    """Decay per round of what a peer has not sent, above 0, at most 1; 0.95 in SparseLoCo."""
    compression_topk: Annotated[U16, Field(ge=1)]
    """Number of elements sent per block, at least 1; 128 in SparseLoCo."""
    compression_chunk: Annotated[U16, Field(ge=1)]
    """Maximum side of a block; each dimension is cut by its largest divisor up to this. 64 in
    SparseLoCo, for blocks of 4,096."""


class OptimizerFedAvg(LocalSteps):
    """Federated averaging: local steps, and then the mean of all peers' params."""


class Places(LocalSteps):
    """All peers take the mean of a few elements of their params, chosen at random."""

    share: Annotated[float, Field(gt=0, le=1)]
    """Share of the params that are exchanged in a round; bytes are proportional. The params that
    are measured and exported are those of the last exchange, on average 1 / share rounds ago."""
    seed: U32
    """Seed of the choice of elements."""
    selector: Literal["random", "shuffled", "partitioned"] = "random"
    """How elements are chosen. random: anew in each round. shuffled: each has its turn once in
    about 1 / share rounds, in an order that is drawn once. partitioned: in an order that is drawn
    again whenever all have had their turn."""


class OptimizerSPARTA(Places):
    """SPARTA: local steps, and then the mean of a few elements of all peers' params."""


class OptimizerSPARTADiLoCo(OuterSteps, Places):
    """SPARTA and, in each round, an outer step of DiLoCo of one fragment of the params."""

    outer_every: Count
    """Rounds from one outer step of a param to its next, which is the number of fragments. Bytes
    are proportional to share + 1 / outer_every."""


class Compressing(OptimizerVariant):
    """Each peer sends the largest DCT coefficients of its momentum."""

    overlaps = True

    clip_grad_norm: NotNegative | None = None
    """Maximum global L2 norm of a peer's gradient; 0 or absent is no clipping."""
    weight_decay: NotNegative | None = None
    """Weight decay: its product with the learning rate is removed from each weight per step; by
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
    """Whether a block that is all zero counts as not sent, so that a param without any gradient, as
    of an expert or a token that never occurs, stays as it is. By default it is sent: as in Psyche,
    with quantize_1bit zeros have the sign +, and such a block steps in every round."""


class OptimizerDistro(Compressing):
    """DisTrO: each peer sends the largest DCT coefficients of its momentum."""


class OptimizerAdaDistro(Compressing):
    """This project's own extension of DisTrO; with the defaults of its own keys it is DisTrO.

    A group is a top-level name of the params: embed, layers, norm or lm_head.
    """

    by_group = ("step_scale", "topk_of", "untransformed")

    second_moment_decay: Decay | None = None
    """Decay of the factored second moment whose root divides a peer's gradient; by default,
    gradients are not divided."""
    update: Literal["sign", "rms", "orthogonal"] = "sign"
    """Update made of the decoded mean. sign: its sign. rms: the mean divided by its root mean
    square. orthogonal: for the matrices in layers, the nearest orthogonal matrix."""
    step_scale: dict[str, NotNegative] = {}
    """Step-size factor by group; 1 for groups that are not named."""
    topk_of: dict[str, Annotated[U16, Field(ge=1)]] = {}
    """compression_topk by group, in place of the common one."""
    untransformed: Annotated[tuple[str, ...], AsTuple] = ()
    """Groups of which elements are sent instead of DCT coefficients."""
    removed: Fraction = 1.0
    """Fraction of what was sent that is removed from the momentum, 0 to 1."""


AnyOptimizer = one_of(OptimizerVariant)
