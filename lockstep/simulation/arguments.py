"""The arguments of `simulate`, checked before anything is compiled or written."""

import inspect
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from pydantic import Field, model_validator

from lockstep.errors import LockstepError
from lockstep.methods import CARDS, AnyOptimizer, card_of
from lockstep.methods.card import Setting, Surroundings, build
from lockstep.methods.misfits import check_faults, check_needs
from lockstep.methods.schedule import AnySchedule, learning_rate_of
from lockstep.optim.dense import from_optax
from lockstep.optim.optimizer import Optimizer, Tree
from lockstep.protocol import links
from lockstep.protocol.closing import Closing
from lockstep.protocol.committee import trainers_of
from lockstep.protocol.driver import RoundSettings
from lockstep.tables.faults import KINDS, Fault, Schedule
from lockstep.tables.links import Links
from lockstep.tables.peers import (
    Aggregation,
    Bits,
    Liars,
    PeerCount,
    PeerLayout,
    ProductBits,
    SimulatedLayout,
)
from lockstep.tables.table import AsTuple, Table, wrong
from lockstep.tables.validation import choices, validate
from lockstep.wire import message as wire

ROUNDS_PER_EPOCH = 10  # peers that are away come back when an epoch begins
MOST_ROUNDS = MOST_EXAMPLES = 2**32 - 1
WITNESSES = 8  # of more peers: were all witnesses, they would take the square of peers' time
Number = Annotated[int, Field(ge=1, lt=2**32)]
Unsaved = Field(exclude=True)  # a simulation that goes on may have another

CALLED = {"faults.schedule": "faults", "peers.count": "peers", "config.total_steps": "steps"}
"""What keys of a run file are called here, besides their last names."""


def _argument(key: str) -> str:
    if key.startswith(("links.", "model.LLM.")):
        return key.removeprefix("model.LLM.")
    return CALLED.get(key, key.rpartition(".")[2])


@dataclass(frozen=True)
class SimulatedConfig:
    """`[config]` of a simulation, as the coordinator reads it: an endless run of short epochs."""

    rows: int  # examples of a round, over all peers
    min_clients: int  # peers without which a round cannot be
    init_min_clients: int
    witness_nodes: int  # peers elected as witnesses; 0 is all, at most 32
    verification_percent: int
    total_steps: int = MOST_ROUNDS  # a simulation can go on later
    rounds_per_epoch: int = ROUNDS_PER_EPOCH
    epoch_time: None = None
    waiting_for_members_extra_time: int = 10
    warmup_time: int = 2**32
    round_witness_time: int = 1
    cooldown_time: int = 1

    def batch_size(self, tokens: int) -> int:
        """Return the examples of a simulated round, always the same number."""
        return self.rows


class SimulatedKeys(NamedTuple):
    """`[peers]` of a simulation, as far as faults depend on it; see `PeersTable`."""

    count: int
    layout: PeerLayout
    bits: Bits
    attention: str = "matmul"
    wire: str = "lockstep"


class Arguments(Table):
    """The arguments of `simulate` that are data, by their names there."""

    optimizer: AnyOptimizer | None  # None for an `Optimizer`
    learning_rate: AnySchedule
    peers: PeerCount
    aggregation: Aggregation
    liars: Liars | None
    steps: Number
    batch_size: Number
    links: Links
    faults: Schedule
    verification_percent: Annotated[int, Field(ge=0, lt=100)]
    max_round_train_time: Number
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    shuffle: bool
    micro_batch: Number | None
    dtype: Literal["float32", "bfloat16"]
    layout: SimulatedLayout
    bits: Annotated[Bits, Field(exclude_if=lambda bits: bits == "machine")]
    product_bits: Annotated[ProductBits, Field(exclude_if=lambda bits: bits == 20)]
    stacked: Annotated[tuple[str, ...], AsTuple]
    eval_every: Number
    correlation_every: Number | None
    checkpoint_every: Annotated[Number, Unsaved]
    on_round: Annotated[Callable | None, Unsaved]
    show_progress: Annotated[bool, Unsaved]
    torch: Annotated[bool, Unsaved]  # whether the params are those of a torch module
    groups: Annotated[tuple[str, ...], Unsaved]  # top-level names of the params

    @model_validator(mode="after")
    def _fits(self) -> "Arguments":
        if self.verification_percent and self.layout != "each":
            text = "since a verifier runs the trainer's own program"
            raise wrong("verification_percent", f"0 with layout = {self.layout}, {text}")
        if (self.micro_batch or 0) > self.batch_size:
            raise wrong("micro_batch", f"at most batch_size ({self.batch_size})")
        if self.torch and self.dtype != "float32":
            text = "which sets its own precision: use torch.autocast in loss_fn"
            raise wrong("dtype", f"float32 with a torch module, {text}")
        if self.torch and self.layout != "each":
            raise wrong("layout", "each with a torch module")
        if self.torch and self.bits != "machine":
            raise wrong("bits", "machine with a torch module: only JAX's operations have rules")
        if self.bits == "machine" and self.product_bits != 20:
            raise wrong("product_bits", '20 without bits = "everywhere"')
        if self.layout == "rounds" and self.bits == "machine":
            text = "since the bits of a program of several rounds are others as compiled"
            raise wrong("layout", f'another with bits = "machine", {text}')
        if self.layout == "rounds" and self.faults:
            raise wrong("faults", "none with layout = rounds, where nobody is planned to fail")
        for number, fault in enumerate(self.faults):
            if self.torch and fault.kind == "wrong_precision":
                text = "another kind with a torch module, which sets its own precision"
                raise wrong(("faults", number, "kind"), text)
        self.links.check(self.peers, "peers")
        config = replace(self.config(0), total_steps=self.steps)
        if self.layout != "rounds":
            peers = SimulatedKeys(self.peers, self.layout, self.bits)
            check_faults(self.faults, peers, config, self.optimizer, _argument)
        return self

    @model_validator(mode="after")
    def _fits_the_optimizer(self) -> "Arguments":
        if self.optimizer is not None:
            percent, rule = self.verification_percent, self.aggregation
            run = Surroundings(percent, self.peers, rule, self.liars, self.layout, self.links)
            check_needs(self.optimizer, run, _argument)
        elif self.links.topology != "broadcast":
            raise wrong(("links", "topology"), "broadcast with an Optimizer of your own")
        elif self.liars is not None:
            raise wrong("liars", "none with an Optimizer, which has its own aggregate")
        elif self.aggregation != "mean":
            raise wrong("aggregation", "mean with an Optimizer, which has its own aggregate")
        return self

    @model_validator(mode="after")
    def _has_the_layers(self) -> "Arguments":
        names, table = ", ".join(self.groups), self.optimizer
        if any(name not in self.groups for name in self.stacked):
            raise wrong("stacked", f"some of {names}")
        if table is None:
            if self.stacked:
                raise wrong("stacked", "none with an Optimizer, which has its own")
            return self
        inner = getattr(table, "inner", table)
        if self.stacked and not (inner.needs_layers or table.sends != "arrays"):
            raise wrong("stacked", f"none with {inner.tag()}, which takes every array as it is")
        if inner.needs_layers and not self.stacked:
            text = "the names of params whose arrays stack the matrices of layers"
            raise wrong("stacked", f"{text}, from {names}: only those get orthogonal steps")
        return self

    @property
    def trainers(self) -> int:
        """Simulated peers that train where all take part; the others verify."""
        return trainers_of(self.peers, self.verification_percent)

    @property
    def rows_of_a_step(self) -> int | None:
        """Examples of each local step, where slower simulated peers take fewer; else they vary."""
        paced = self.optimizer is not None and self.optimizer.paced
        return self.batch_size if paced else None

    def config(self, rows: int) -> SimulatedConfig:
        """Return the coordinator's config for a simulation's rounds of `rows` examples."""
        many = self.peers > WITNESSES
        least = WITNESSES if many else 1
        return SimulatedConfig(
            rows=rows,
            min_clients=least,
            init_min_clients=least,
            witness_nodes=WITNESSES if many else 0,
            verification_percent=self.verification_percent,
        )

    def round_settings(self, optimizer: Any) -> RoundSettings:
        """Return the settings of a simulation's rounds; `optimizer` is as for `simulate`."""
        is_own = isinstance(optimizer, Optimizer)
        inner_steps = optimizer.inner_steps if is_own else self.optimizer.steps_of_a_round
        rows = self.trainers * inner_steps * self.batch_size
        if rows > MOST_EXAMPLES:
            raise LockstepError(
                f"simulate: batch_size is {self.batch_size}: {rows:,} examples in a round of "
                f"{self.trainers} peers with {inner_steps:,} local steps, expected at most "
                f"{MOST_EXAMPLES:,}"
            )
        closing = Closing(
            limit=self.max_round_train_time, most_rows=rows, each=inner_steps * self.batch_size
        )
        if self.optimizer:
            speeds = links.speeds(self.links, self.peers)
            # nobody replays it, so it never settles
            closing = self.optimizer.closing(closing, speeds, settle_every=0, last=self.steps)
        return RoundSettings(
            coordinator=self.config(rows),
            links=self.links,
            peers=self.peers,
            seed=self.seed,
            row_tokens=1,  # an example counts as one token
            micro_batch=self.micro_batch or self.batch_size,
            closing=closing,
        )


# ---- Reading ----


def read_arguments(inputs: Mapping[str, Any], groups: Sequence[str], *, torch: bool) -> Arguments:
    """Return the arguments that are data, checked by the tables of a run file that have them too.

    `inputs` are those of `simulate`, by name; `groups` are the top-level names of the params, which
    are those of a `torch` module or not.
    """
    optimizer, stacked = inputs["optimizer"], inputs["stacked"]
    tag, table, rate = None, None, 0.0
    if not isinstance(optimizer, Optimizer):
        layers = stacked if isinstance(stacked, list | tuple) else ()
        tag, table, rate = tagged(optimizer, groups, layers)
    document = dict(inputs) | {
        "optimizer": {tag: table} if tag else None,
        "learning_rate": _schedule(inputs["learning_rate"], rate),
        "links": {} if inputs["links"] is None else inputs["links"],
        "torch": torch,
        "groups": tuple(groups),
    }
    if torch and inputs["micro_batch"] is None:
        document["micro_batch"] = inputs["batch_size"]
    document = {name: document[name] for name in Arguments.model_fields}
    return validate(Arguments, document, "simulate")


def tagged(
    optimizer: str | Mapping[str, Any], groups: Sequence[str] = (), stacked: Sequence[str] = ()
) -> tuple[str, dict[str, Any], float]:
    """Return the argument `optimizer` as run files have it, settings over its card's; and its rate.

    `optimizer` is a name such as "diloco" or "AdamW", or a table of a run file, such as {"DiLoCo":
    {"inner_steps": 10}}. Of the params' top-level names `groups`, `stacked` are layers.
    """
    table: Any = {optimizer: {}} if isinstance(optimizer, str) else optimizer
    if not isinstance(table, Mapping) or len(table) != 1:
        raise LockstepError(
            f"simulate: optimizer is {optimizer!r}, expected a name, a table with one name, or an "
            "Optimizer"
        )
    ((name, overrides),) = table.items()
    card = card_of(str(name))
    if card is None or not isinstance(overrides, Mapping):
        names = [name.replace("-", "_") for name in CARDS]  # as the library's functions are called
        raise LockstepError(
            f"simulate: optimizer is {optimizer!r}, expected a table such as "
            '{"DiLoCo": {"inner_steps": 10}}, an Optimizer, or one of '
            + choices(names, str(name).lower() if card is None else "")
        )
    settings = dict(card.settings)
    if scale := settings.get("step_scale"):
        layers = dict.fromkeys(stacked, scale["layers"])  # whatever a model calls its layers
        settings["step_scale"] = layers | {key: x for key, x in scale.items() if key in groups}
    settings |= overrides
    if "inner" in settings:
        inner, table, _ = tagged(settings["inner"], groups, stacked)
        settings["inner"] = {inner: table}
    return card.tag, settings, card.rates[0].rate


def _schedule(learning_rate: Any, default: float) -> Any:
    """Return the learning-rate argument of `simulate` as the table of a run file."""
    if learning_rate is None or callable(learning_rate):
        learning_rate = default
    if isinstance(learning_rate, Mapping):
        return dict(learning_rate)
    if isinstance(learning_rate, numbers.Real) and not isinstance(learning_rate, bool):  # NumPy's
        learning_rate = float(learning_rate)
    constant = {"base_lr": learning_rate, "warmup_init_lr": 0.0, "warmup_steps": 0}
    return {"Constant": constant}


# ---- What they make, and checks of the rest ----


def the_optimizer(arguments: Arguments, optimizer: Any, learning_rate: Any) -> Optimizer:
    """Return the optimizer itself, of the arguments of `simulate`."""
    if isinstance(optimizer, Optimizer):
        if learning_rate is not None:
            expected = "None with an Optimizer, which has its own"
            raise LockstepError(
                f"simulate: learning_rate is {learning_rate!r}, expected {expected}"
            )
        return optimizer
    rate = learning_rate if callable(learning_rate) else learning_rate_of(arguments.learning_rate)
    setting = Setting(rate, 0, arguments.stacked, arguments.aggregation, arguments.liars or 0)
    return build(arguments.optimizer, setting, arguments.groups)


def adopted(optimizer: optax.GradientTransformation, params: Tree) -> Optimizer:
    """Return the argument's optimizer of optax as one of peers that exchange whole gradients."""
    try:
        made = from_optax(optimizer)
        state = jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x)[1], params)
    except Exception as error:
        what = " ".join(str(error).split())
        raise LockstepError(f"simulate: optimizer takes no step of these params: {what}") from error
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in jax.tree.leaves(state)):
        raise LockstepError("simulate: optimizer has a state of random keys, expected numbers")
    return made


def check_signs(faults: Sequence[Fault], form: wire.Form) -> None:
    """Check that messages of this form can carry the faults that `simulate` was given."""
    for number, fault in enumerate(faults):
        if KINDS[fault.kind].needs == "values" and not all(leaf.sized for leaf in form.packed):
            raise LockstepError(
                f"simulate: faults[{number}].kind is {fault.kind}, expected a kind for signs, "
                "since signs have no size"
            )


def check_call(function: Callable, name: str, form: str, *arguments: Any) -> None:
    """Check that an argument that is a function, `name` in errors, can be called with these."""
    if not callable(function):
        kind = type(function).__name__
        raise LockstepError(f"simulate: {name} is {kind}, expected a function: {form}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some that are written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise LockstepError(
            f"simulate: {name} is a function that cannot be called so: {error}; expected {form}"
        ) from error


def folder(name: str, path: Any) -> Path | None:
    """Return an argument's folder, writable and made if it does not exist; None for None."""
    if path is None:
        return None
    is_path = isinstance(path, str | os.PathLike) and str(path)
    if not is_path:
        raise LockstepError(f"simulate: {name} is {path!r}, expected a path or None")
    directory = Path(path)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(0, "no permission to write there")
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        reason = getattr(error, "strerror", None) or error
        raise LockstepError(
            f"simulate: {name} is {str(directory)!r}, expected a folder to write to: {reason}"
        ) from error
    return directory
