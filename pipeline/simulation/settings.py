"""What `simulate` is asked for, as the run that stage train would read from a file."""

import numbers
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Optimizer
from pipeline.programs.optimizers import Setting, build, learning_rate_of, optimizer_of
from pipeline.runfile.explain import validate
from pipeline.runfile.fault_kinds import KINDS
from pipeline.runfile.optimizer_table import Compressing, OptimizerVariant
from pipeline.runfile.psyche import LLM, OlderConfig
from pipeline.runfile.table import U32
from pipeline.wire import message as wire

ROUNDS_PER_EPOCH = 10  # peers that are away come back when an epoch begins
MOST_ROUNDS = MOST_EXAMPLES = 2**32 - 1
WITNESSES = 8  # of more peers: were all witnesses, they would take the square of peers' time


class Named(NamedTuple):
    """An optimizer's settings where none are given."""

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
    "SPARTADiLoCo": "sparta_diloco",
    "AdaDistro": "ada_distro",
}
DEMO = {"quantize_1bit": False}  # DeMo is DisTrO with values
IN_FULL = Named({}, 1e-3)  # of an optimizer without a row above, whose table is given in full

# How the run file calls what is an argument here.
ARGUMENTS = {
    "model.LLM.": "",
    "lr_schedule": "learning_rate",
    "faults.schedule": "faults",
    "peers.count": "peers",
    "peers.layout": "layout",
    "config.total_steps": "steps",
    "config.verification_percent": "verification_percent",
}


class SimulatedConfig(OlderConfig):
    """`[config]` of a simulation, whose batch has no bound of 16 bits."""

    global_batch_size: U32
    """Examples per round, over all peers."""


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


def run_of(
    optimizer: str | Mapping[str, Any] | Optimizer,
    learning_rate: Any,
    *,
    config: Mapping[str, int],
    peers: Mapping[str, Any],
    links: Mapping[str, Any] | None,
    faults: Sequence[Mapping[str, Any]],
    batch_size: int,
) -> runfile.Run:
    """Return the run that does what `simulate` is asked for.

    It has no last round of its own, so that a simulation can go on later.

    Args:
      optimizer: As of `simulate`.
      learning_rate: As of `simulate`.
      config: total_steps, max_round_train_time and verification_percent of `[config]`.
      peers: `[peers]`.
      links: `[links]`; its tokens are examples.
      faults: `[faults]` schedule.
      batch_size: Examples of a peer in a local step.

    Raises:
      LockstepError: A setting is not within its bounds.
    """
    own = isinstance(optimizer, Optimizer)
    tag, table = ("Dummy", {}) if own else tagged(optimizer)
    default = DEFAULTS.get(tag, IN_FULL).learning_rate
    document: dict[str, Any] = {
        "architecture": "HfAuto",
        "data_type": "Pretraining",
        "max_seq_len": 1,  # an example counts as one token
        "checkpoint": "Ephemeral",
        "data_location": "Dummy",
        "lr_schedule": schedule_of(learning_rate, default),
        "optimizer": {tag: table} if table else tag,
    }
    many = peers["count"] > WITNESSES
    trainers = peers["count"] - peers["count"] * config["verification_percent"] // 100
    try:
        llm = validate(LLM, document, "simulate")
        inner_steps = optimizer.inner_steps if own else llm.inner_steps
        examples = trainers * inner_steps * batch_size
        if examples > MOST_EXAMPLES:
            raise LockstepError(
                f"simulate: batch_size is {batch_size}: {examples:,} examples in a round of "
                f"{trainers} peers with {inner_steps:,} local steps, expected at most "
                f"{MOST_EXAMPLES:,}"
            )
        whole_config = SimulatedConfig(
            **config,
            rounds_per_epoch=ROUNDS_PER_EPOCH,
            warmup_time=2**32,
            cooldown_time=1,
            round_witness_time=1,
            min_clients=WITNESSES if many else 1,
            witness_nodes=WITNESSES if many else 0,  # 0: all
            global_batch_size=examples,
            checkpointers=(),
        )
        whole = {
            "config": whole_config,
            "model": {"LLM": document},
            "peers": dict(peers),
            "links": {} if links is None else links,
            "faults": {"schedule": faults},
        }
        run = runfile.parse(whole, "simulate")
    except LockstepError as error:
        text = str(error)
        for key, argument in ARGUMENTS.items():
            text = text.replace(key, argument)
        raise LockstepError(text) from error
    endless = whole_config.model_copy(update={"total_steps": MOST_ROUNDS})
    return run.model_copy(update={"config": endless})


def optimizer_of_run(
    run: runfile.Run,
    optimizer: Any,
    learning_rate: Any,
    groups: Sequence[str],
    stacked: tuple[str, ...],
) -> Optimizer:
    """Return the optimizer itself.

    Args:
      run: The run, of `run_of`.
      optimizer: As of `simulate`.
      learning_rate: As of `simulate`.
      groups: Top-level names of the params.
      stacked: Those whose arrays have a leading axis of layers.

    Raises:
      LockstepError: A setting names no group, or changes nothing.
    """
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
    table = run.llm.optimizer
    inner = getattr(table, "inner", table)
    matrices = isinstance(inner, runfile.OptimizerMuon) or (
        getattr(table, "update", "") == "orthogonal"
    )
    blocks = isinstance(table, Compressing | runfile.OptimizerSparseLoCo)
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
    rate = learning_rate if callable(learning_rate) else learning_rate_of(run.llm.lr_schedule)
    return build(table, Setting(rate, run.peers.overlap, stacked), groups)


def check_faults(run: runfile.Run, form: wire.Form) -> None:
    """Check that messages of this form can carry the run's faults.

    Raises:
      LockstepError: They cannot.
    """
    if not form.sparse:
        return
    for number, fault in enumerate(run.faults.schedule):
        if KINDS[fault.kind].needs == "values" and form.sparse[0][0].value_NK.dtype == bool:
            raise LockstepError(
                f"simulate: faults[{number}].kind is {fault.kind}, expected a kind for signs, "
                "since signs have no size"
            )
