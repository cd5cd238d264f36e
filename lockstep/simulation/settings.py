"""What `simulate` is asked for, checked by the tables of a run file that have it too."""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from lockstep.errors import LockstepError
from lockstep.methods.build import (
    Setting,
    aggregate_of,
    build,
    learning_rate_of,
    optimizer_of,
)
from lockstep.methods.faults import check_faults
from lockstep.methods.optimizer_table import (
    AnyOptimizer,
    Compressing,
    OptimizerDecoupledDiLoCo,
    OptimizerMuon,
    OptimizerSparseLoCo,
    OptimizerVariant,
)
from lockstep.methods.schedule_table import AnySchedule
from lockstep.optim.optimizer import Optimizer
from lockstep.protocol import links
from lockstep.swarm.round_settings import RoundSettings, pace_of
from lockstep.tables.explain import validate
from lockstep.tables.faults import KINDS, Fault, Schedule
from lockstep.tables.links import Links
from lockstep.tables.peers import Aggregation, Liars, PeerCount, PeerLayout
from lockstep.tables.table import Table, wrong
from lockstep.wire import message as wire
from pipeline.runfile.checks.aggregation import check_aggregation
from pipeline.runfile.checks.decoupled import check_decoupled
from pipeline.runfile.checks.topology import check_topology

ROUNDS_PER_EPOCH = 10  # peers that are away come back when an epoch begins
MOST_ROUNDS = MOST_EXAMPLES = 2**32 - 1
WITNESSES = 8  # of more peers: were all witnesses, they would take the square of peers' time


class Named(NamedTuple):
    """An optimizer's default settings."""

    table: dict[str, Any]
    learning_rate: float


ADAMW = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 1e-4}
COMPRESSED = {"compression_decay": 0.999, "compression_topk": 32, "compression_chunk": 64}
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "nesterov": True}
PLACES = {"inner_steps": 1, "share": 0.005, "seed": 0}
DEFAULTS = {
    "AdamW": Named(ADAMW, 1e-3),
    "Muon": Named(ADAMW | {"momentum": 0.95}, 1e-3),
    "SGD": Named({"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}, 0.1),
    "DiLoCo": Named({"inner_steps": 100, "inner": {"AdamW": ADAMW}, **OUTER}, 1e-3),
    "StreamingDiLoCo": Named(
        {"inner_steps": 100, "fragments": 4, "delay": 1, "mixing": 0.5}
        | {"inner": {"AdamW": ADAMW}, **OUTER},
        1e-3,
    ),
    "DecoupledDiLoCo": Named(
        {"inner_steps": 100, "fragments": 4, "delay": 1, "adopt": "overwrite", "quorum": 1}
        | {"grace_seconds": 1.0, "max_age": 2, "inner": {"AdamW": ADAMW}}
        | {"outer": {"Nesterov": {"learning_rate": 0.7, "momentum": 0.9}}},
        1e-3,
    ),
    "SparseLoCo": Named(
        {"inner_steps": 30, "outer_learning_rate": 1.0, "error_feedback": 0.95}
        | {"compression_topk": 128, "compression_chunk": 64, "inner": {"AdamW": ADAMW}},
        1e-3,
    ),
    "FedAvg": Named({"inner_steps": 10, "inner": {"AdamW": ADAMW}}, 1e-3),
    "SPARTA": Named({**PLACES, "inner": {"AdamW": ADAMW}}, 1e-3),
    "SPARTADiLoCo": Named({**PLACES, **OUTER, "outer_every": 100, "inner": {"AdamW": ADAMW}}, 1e-3),
    "Distro": Named(COMPRESSED | {"quantize_1bit": True}, 1e-3),
    "AdaDistro": Named(COMPRESSED | {"quantize_1bit": True}, 1e-3),
}
SPELLED = {  # as functions of the library are called; other names in lower case
    "StreamingDiLoCo": "streaming_diloco",
    "DecoupledDiLoCo": "decoupled_diloco",
    "SPARTADiLoCo": "sparta_diloco",
    "AdaDistro": "ada_distro",
}
DEMO = {"quantize_1bit": False}  # DeMo is DisTrO with values
IN_FULL = Named({}, 1e-3)  # of an optimizer without a row above, whose table is given in full

CALLED = {"faults.schedule": "faults", "peers.count": "peers", "config.total_steps": "steps"}
"""What keys of a run file are called here, besides their last names."""


def _argument(key: str) -> str:
    return CALLED.get(key, key.rpartition(".")[2])


@dataclass(frozen=True)
class SimulatedConfig:
    """`[config]` of a simulation, as the coordinator reads it, in one endless run of short epochs.

    Attributes:
      rows: Examples of a round, over all peers.
      min_clients, init_min_clients: Peers without which a round cannot be.
      witness_nodes: Peers elected as witnesses; 0 is all.
    """

    rows: int
    min_clients: int
    init_min_clients: int
    witness_nodes: int
    verification_percent: int
    max_round_train_time: int
    total_steps: int = MOST_ROUNDS  # a simulation can go on later
    rounds_per_epoch: int = ROUNDS_PER_EPOCH
    epoch_time: None = None
    waiting_for_members_extra_time: int = 10
    warmup_time: int = 2**32
    round_witness_time: int = 1
    cooldown_time: int = 1

    def batch_size(self, tokens: int) -> int:
        """Return the examples of a round, which are always as many."""
        del tokens
        return self.rows


class SimulatedKeys(NamedTuple):
    """`[peers]` of a simulation, as far as methods and faults depend on it; see `PeersTable`."""

    count: int
    layout: PeerLayout
    aggregation: Aggregation
    liars: int | None
    attention: str = "matmul"
    wire: str = "lockstep"


class Arguments(Table):
    """The arguments of `simulate` that are data, by their names there."""

    optimizer: AnyOptimizer | None  # None for an `Optimizer`
    learning_rate: AnySchedule
    peers: PeerCount
    aggregation: Aggregation
    liars: Liars | None
    steps: int
    batch_size: int
    links: Links
    faults: Schedule
    verification_percent: int
    max_round_train_time: int
    seed: int
    shuffle: bool
    micro_batch: int | None
    dtype: Literal["float32", "bfloat16"]
    layout: PeerLayout
    stacked: tuple[str, ...]
    eval_every: int
    correlation_every: int | None

    @model_validator(mode="after")
    def _fits(self) -> "Arguments":
        if self.verification_percent and self.layout != "each":
            text = "since a verifier runs the trainer's own program"
            raise wrong("verification_percent", f"0 with layout = {self.layout}, {text}")
        self.links.check(self.peers, "peers")
        config = replace(self.config(0), total_steps=self.steps)
        check_faults(self.faults, self.told_peers, config, self.optimizer, _argument)
        percent = self.verification_percent
        check_decoupled(self.optimizer, self.told_peers, self.links, percent, _argument)
        if self.optimizer is not None:
            trainers = self.peers - self.peers * self.verification_percent // 100
            check_aggregation(self.told_peers, trainers, self.optimizer, ())
            check_topology(self.links, self.aggregation, self.optimizer)
        elif self.links.topology != "broadcast":
            raise wrong(("links", "topology"), "broadcast with an Optimizer of your own")
        elif self.liars is not None:
            raise wrong("liars", "none with an Optimizer, which has its own aggregate")
        elif self.aggregation != "mean":
            raise wrong("aggregation", "mean with an Optimizer, which has its own aggregate")
        return self

    @property
    def told_peers(self) -> SimulatedKeys:
        """What a run file has of it in `[peers]`."""
        return SimulatedKeys(self.peers, self.layout, self.aggregation, self.liars)

    @property
    def rows_of_a_step(self) -> int | None:
        """Examples of each local step, where slower peers take fewer of them; else they vary."""
        decoupled = isinstance(self.optimizer, OptimizerDecoupledDiLoCo)
        return self.batch_size if decoupled else None

    def config(self, rows: int) -> SimulatedConfig:
        """Return what the coordinator reads, for rounds of so many examples."""
        many = self.peers > WITNESSES
        least = WITNESSES if many else 1
        return SimulatedConfig(
            rows=rows,
            min_clients=least,
            init_min_clients=least,
            witness_nodes=WITNESSES if many else 0,
            verification_percent=self.verification_percent,
            max_round_train_time=self.max_round_train_time,
        )

    def round_settings(self, optimizer: Any) -> RoundSettings:
        """Return what a round reads, with the micro-batch that is asked for, or the largest.

        Args:
          optimizer: The argument of `simulate`.

        Raises:
          LockstepError: A round would have too many examples.
        """
        own = isinstance(optimizer, Optimizer)
        inner_steps = optimizer.inner_steps if own else self.optimizer.steps_of_a_round
        trainers = self.peers - self.peers * self.verification_percent // 100
        rows = trainers * inner_steps * self.batch_size
        if rows > MOST_EXAMPLES:
            raise LockstepError(
                f"simulate: batch_size is {self.batch_size}: {rows:,} examples in a round of "
                f"{trainers} peers with {inner_steps:,} local steps, expected at most "
                f"{MOST_EXAMPLES:,}"
            )
        return RoundSettings(
            coordinator=self.config(rows),
            links=self.links,
            peers=self.peers,
            seed=self.seed,
            row_tokens=1,  # an example counts as one token
            most_rows=rows,
            micro_batch=self.micro_batch or self.batch_size,
            pace=pace_of(
                self.optimizer,
                links.speeds(self.links, self.peers),
                self.rows_of_a_step,
                batch=rows,
                settle_every=0,  # nobody replays it
                last=self.steps,
            ),
        )


def tagged(optimizer: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an optimizer's name in a run file, and its settings, over the defaults.

    Args:
      optimizer: A name such as "diloco", "demo" or "AdamW"; or a table of a run file, such as
        {"DiLoCo": {"inner_steps": 10}}.

    Raises:
      LockstepError: There is no such optimizer.
    """
    table: Any = {optimizer: {}} if isinstance(optimizer, str) else optimizer
    if not isinstance(table, Mapping) or len(table) != 1:
        raise LockstepError(
            f"simulate: optimizer is {optimizer!r}, expected a name, a table with one name, or an "
            "Optimizer"
        )
    ((name, given),) = table.items()
    trained = [kind for kind in optimizer_of.registry if issubclass(kind, OptimizerVariant)]
    known = {variant.tag().lower(): variant.tag() for variant in trained}
    short = str(name).lower().replace("_", "").replace("-", "")
    tag = "Distro" if short == "demo" else known.get(short)
    if tag is None or not isinstance(given, Mapping):
        names = ["demo", *(SPELLED.get(tag, tag.lower()) for tag in DEFAULTS)]
        near = get_close_matches(str(name).lower(), names, n=1) if tag is None else ()
        raise LockstepError(
            f"simulate: optimizer is {optimizer!r}, expected one of {', '.join(names)}, a table "
            'such as {"DiLoCo": {"inner_steps": 10}}, or an Optimizer'
            + (f"; did you mean {near[0]}?" if near else "")
        )
    settings = DEFAULTS.get(tag, IN_FULL).table | (DEMO if short == "demo" else {}) | dict(given)
    if "inner" in settings:
        inner_tag, inner = tagged(settings["inner"])
        settings["inner"] = {inner_tag: inner}
    return tag, settings


def schedule_of(learning_rate: Any, default: float) -> Any:
    """Return a learning rate as the table of a run file."""
    if learning_rate is None or callable(learning_rate):
        learning_rate = default
    if isinstance(learning_rate, Mapping):
        return dict(learning_rate)
    if isinstance(learning_rate, numbers.Real) and not isinstance(learning_rate, bool):  # NumPy's
        learning_rate = float(learning_rate)
    constant = {"base_lr": learning_rate, "warmup_init_lr": 0.0, "warmup_steps": 0}
    return {"Constant": constant}


def asked_of(optimizer: Any, learning_rate: Any, others: Mapping[str, Any]) -> Arguments:
    """Return the arguments of `simulate` that are data, checked by the tables of a run file.

    Args:
      optimizer: The argument of `simulate`.
      learning_rate: The argument of `simulate`.
      others: The other fields of `Arguments`.

    Raises:
      LockstepError: One is not within its bounds.
    """
    own = isinstance(optimizer, Optimizer)
    tag, table = (None, None) if own else tagged(optimizer)
    default = DEFAULTS.get(tag, IN_FULL).learning_rate
    document = {
        "optimizer": None if own else {tag: table} if table else tag,
        "learning_rate": schedule_of(learning_rate, default),
        **others,
    }
    return validate(Arguments, document, "simulate")


def of_torch(asked: Arguments) -> Arguments:
    """Return the arguments of a simulation of a torch module.

    Raises:
      LockstepError: One asks for what only JAX's programs have.
    """
    if asked.dtype != "float32":
        raise LockstepError(
            f"simulate: dtype is {asked.dtype!r}, expected 'float32' with a torch module, whose "
            "precision is its own: use torch.autocast in loss_fn"
        )
    if asked.layout != "each":
        raise LockstepError(
            f"simulate: layout is {asked.layout!r}, expected 'each' with a torch module"
        )
    if any(fault.kind == "wrong_precision" for fault in asked.faults):
        raise LockstepError(
            "simulate: faults has wrong_precision, expected another kind with a torch module, "
            "whose precision is its own"
        )
    return asked.model_copy(update={"micro_batch": asked.micro_batch or asked.batch_size})


def the_optimizer(
    asked: Arguments, optimizer: Any, learning_rate: Any, groups: Sequence[str]
) -> Optimizer:
    """Return the optimizer itself.

    Args:
      asked: The other arguments.
      optimizer: The argument of `simulate`.
      learning_rate: The argument of `simulate`.
      groups: Top-level names of the params.

    Raises:
      LockstepError: A setting names no group, or changes nothing.
    """
    stacked = asked.stacked
    if unknown := [name for name in stacked if name not in groups]:
        raise LockstepError(
            f"simulate: stacked has {unknown[0]!r}, expected some of {', '.join(groups)}"
        )
    if isinstance(optimizer, Optimizer):
        if stacked:
            raise LockstepError(
                f"simulate: stacked is {stacked!r}, expected none with an Optimizer, which "
                "has its own"
            )
        if learning_rate is not None:
            raise LockstepError(
                f"simulate: learning_rate is {learning_rate!r}, expected None with an Optimizer, "
                "which has its own"
            )
        return optimizer
    table = asked.optimizer
    inner = getattr(table, "inner", table)
    matrices = isinstance(inner, OptimizerMuon) or (getattr(table, "update", "") == "orthogonal")
    blocks = isinstance(table, Compressing | OptimizerSparseLoCo)
    if stacked and not (matrices or blocks):
        raise LockstepError(
            f"simulate: stacked is {stacked!r}, expected none with {inner.tag()}, which "
            "takes every array as it is"
        )
    if matrices and not stacked:
        raise LockstepError(
            "simulate: stacked is (), expected the names of params whose arrays are matrices of "
            f"layers, of {', '.join(groups)}: only those have orthogonal steps"
        )
    rate = learning_rate if callable(learning_rate) else learning_rate_of(asked.learning_rate)
    return build(table, Setting(rate, 0, stacked, aggregate_of(asked.told_peers)), groups)


def check_signs(faults: Sequence[Fault], form: wire.Form) -> None:
    """Check that messages of this form can carry the faults.

    Raises:
      LockstepError: They cannot.
    """
    if not form.sparse:
        return
    for number, fault in enumerate(faults):
        if KINDS[fault.kind].needs == "values" and form.sparse[0][0].value_NK.dtype == bool:
            raise LockstepError(
                f"simulate: faults[{number}].kind is {fault.kind}, expected a kind for signs, "
                "since signs have no size"
            )
