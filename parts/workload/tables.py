"""What a workload adds to a run file: `[workload]`, its worker, its data, and its own optimizer."""

from typing import TYPE_CHECKING, Annotated, Literal, cast

from pydantic import Field, JsonValue, model_validator

from lockstep.methods.card import Setting
from lockstep.methods.dense import Dense
from lockstep.methods.diloco import Fragmented
from lockstep.tables.table import U32, AsTuple, Distinct, Name, Positive, Table, Url, wrong
from pipeline.runfile.checkpoint import CheckpointEphemeral, CheckpointRun
from pipeline.runfile.data import AnyShuffle, Data, HeldOutPercent
from pipeline.runfile.strangers_values import FREE, NEVER, SAID, AnswerRow
from pipeline.runfile.tables import CoreRuntime, Evaluate, Peers

if TYPE_CHECKING:
    from lockstep.optim.optimizer import Optimizer
    from pipeline.runfile import Run

# The keys of [peers] that say how models of Lockstep compute, and no workload.
OF_OUR_MODELS = (
    "bits",
    "layout",
    "fsdp",
    "processes",
    "precision",
    "attention",
    "remat",
    "head_tokens",
    "balance_speed",
    "scan_layers",
)
WORKLOAD = "with workload.factory"

FactoryName = Annotated[str, Field(pattern=r"^([^\W\d][\w.]*:[^\W\d][\w.]*)?$")]
Glob = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*[^\s\x00][^\x00]*$")]
Globs = Annotated[tuple[Glob, ...], Distinct, AsTuple]
Word = Annotated[str, Field(pattern=r"^[^\x00]*$")]


class Workload(Table):
    """A model of your own, trained by code in workloads/, in a process of its own."""

    factory: FactoryName = ""
    """Function or class that returns the workload, as module:name, with the module in workloads/;
    empty means that the run trains one of Lockstep's own models. With a factory, [model.LLM] has
    architecture = "HfAuto", checkpoint = "Ephemeral", and as max_seq_len the count of numbers in a
    row."""
    config: dict[str, JsonValue] = {}
    """The table that the factory is called with; it may have any keys."""
    seed: U32 = 0
    """Seed of the workload's initial params."""
    include: Globs = ()
    """Shell patterns of the names of the params that are trained; empty means all."""
    exclude: Globs = ()
    """Shell patterns of the names of params that are not trained although `include` matches
    them."""
    repeats: bool = Field(default=True, exclude_if=bool)
    """Whether the same params, rows and seed give the same step. With false the run trains anyway,
    and no window of it can be audited."""
    inner: Literal["gradient", "worker", "command"] = "gradient"
    """What the workload computes. gradient: gradients; the run's optimizer takes the local steps.
    worker: all local steps of a round, with its own optimizer, in its method run_inner_loop.
    command: the same, done by a command."""
    command: Annotated[tuple[Word, ...], AsTuple] = ()
    """The command of inner = "command" and its arguments; {job_manifest} and {result_manifest}
    stand for the paths of job.json and result.json."""
    command_seconds: Positive = 3600.0
    """Time limit of the command in seconds; after it the command is ended and its peer is lost."""

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> "Workload":
        if bool(self.command) != (self.inner == "command"):
            has = "no command" if self.command else "a program and its arguments"
            raise wrong("command", f'{has} with inner = "{self.inner}"')
        if self.command and not self.command[0].strip():
            raise wrong(("command", 0), "a program")
        fields = type(self).model_fields.items()
        changed = [name for name, field in fields if getattr(self, name) != field.default]
        if changed and not self.factory:
            raise wrong("factory", f"a factory as module:name, since {changed[0]} is set")
        return self


class WorkerRuntime(CoreRuntime):
    """The keys of `[runtime]` for a workload's process."""

    worker_python: str = ""
    """Python interpreter that runs a workload, with its packages; empty means the one that runs
    Lockstep."""
    worker_module: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$")] = (
        "lockstep_worker.worker"
    )
    """Module that serves a workload: Lockstep's, or another that speaks burn_p2p's worker protocol,
    such as burn_p2p_python_runtime.worker."""
    worker_path: Annotated[tuple[str, ...], AsTuple] = ()
    """Folders in which a worker looks for modules besides workloads/, before those of its
    Python."""
    worker_env: dict[str, str] = {}
    """Environment variables of a worker; it inherits no others, except PATH and the like."""
    worker_start_seconds: Positive = 120.0
    """Time limit for a worker to start, in seconds; during it the worker imports its packages."""


class DataArrays(Data):
    """Arrays of examples, for a workload: a row is the bytes of each array of one example.

    Arrays are in the order of their names, and each is padded with zeros to a multiple of 4 bytes.
    `model.LLM.max_seq_len` is the length of a row in words of 4 bytes, which `lockstep download
    --dry-run` prints.
    """

    holds_tokens = False
    path: Url
    """Path of a .npy or .safetensors file, or of a folder, at most 192 bytes. In a folder, each
    .npy file is one array, whereas .safetensors files add their examples one file after the other.
    The first axis of each array counts the examples."""
    held_out_percent: HeldOutPercent | None = None
    """Percentage of the examples that no peer trains on, above 0 and below 100, spread evenly. By
    default the examples in the folder held_out/ of the path are held out; without that folder,
    none."""
    shuffle: AnyShuffle
    """Order of the train split's examples."""


class DataFiles(Data):
    """Files of any content, for a workload: a row is the SHA-256 of a file, in 8 words of 4 bytes.

    `model.LLM.max_seq_len` is 8. The files are copied to data/shards/files, each under its hash,
    and the workload receives their paths.
    """

    holds_tokens = False
    path: Url
    """Path of the folder, at most 192 bytes; files in its subfolders are read too, hidden files are
    not."""
    pattern: Name = "*"
    """Shell pattern of the files' paths in the folder, where * also matches a slash."""
    held_out_percent: HeldOutPercent | None = None
    """Percentage of the files that no peer trains on, above 0 and below 100, spread evenly. By
    default the files in the folder held_out/ of the path are held out; without that folder,
    none."""
    shuffle: AnyShuffle
    """Order of the train split's files."""


class DataWorkload(Data):
    """The arrays that the workload's own method dataset returns; rows are made as for Arrays."""

    holds_tokens = False
    held_out_percent: HeldOutPercent | None = None
    """Percentage of its examples that no peer trains on, above 0 and below 100, spread evenly. By
    default the examples of dataset("held_out") are held out, if there are any."""
    shuffle: AnyShuffle
    """Order of the train split's examples."""


class OptimizerWorkload(Dense):
    """The optimizer of the workload, which takes all local steps of a round by itself."""

    def build(self, setting: Setting) -> "Optimizer":
        """Return the optimizer that takes over the params that the workload's steps led to."""
        # its local steps arrive as one: where they led to is the params minus that
        from lockstep.optim.dense import sgd

        return sgd(1.0)


TABLES = {"workload": Workload}
RUNTIME = WorkerRuntime
DATA = "model.LLM.data_location"
ANSWERS: tuple[AnswerRow, ...] = (
    ("workload", "factory command", NEVER),
    ("workload", "config seed include exclude repeats inner command_seconds", FREE),
    (DATA, "Arrays Files Workload", SAID),  # of this disk, or of code that comes later
    (f"{DATA}.Files", "pattern", FREE),
)


def workload_of(run: "Run") -> Workload:
    """Return the table `[workload]` of a run."""
    return cast("Workload", run.workload)


def runtime_of(run: "Run") -> WorkerRuntime:
    """Return the table `[runtime]` of a run, with the keys for a workload's process."""
    return cast("WorkerRuntime", run.runtime)


def rules(run: "Run") -> None:
    """Check that a workload fits the tables of the model that it replaces."""
    _check_optimizer(run)
    if not workload_of(run).factory:
        return
    where, llm, evaluate = ("model", "LLM"), run.llm, run.evaluate
    if llm.architecture != "HfAuto":
        raise wrong((*where, "architecture"), f"HfAuto {WORKLOAD}, which makes the model")
    if not isinstance(llm.checkpoint, CheckpointEphemeral | CheckpointRun):
        text = f"Ephemeral {WORKLOAD}, which makes the params, or Run"
        raise wrong((*where, "checkpoint"), text)
    for name in OF_OUR_MODELS:
        if getattr(run.peers, name) != (default := Peers.model_fields[name].default):
            raise wrong(
                ("peers", name), f"{'none' if default is None else repr(default)} {WORKLOAD}"
            )
    if evaluate.every:
        raise wrong(("evaluate", "every"), f"0 {WORKLOAD}: tasks need a model of models/")
    if set(evaluate.tasks) - set(Evaluate.model_fields["tasks"].default):
        text = f'["next_line"] or [] {WORKLOAD}: tasks need a model of models/'
        raise wrong(("evaluate", "tasks"), text)
    if run.export.every_epoch:
        text = f"false {WORKLOAD}: what is pushed between rounds is a Hugging Face folder"
        raise wrong(("export", "every_epoch"), text)
    for index, fault in enumerate(run.faults.schedule):
        if fault.kind == "wrong_precision":
            text = f"another kind {WORKLOAD}, since a workload sets its own precision"
            raise wrong(("faults", "schedule", index, "kind"), text)


def _check_optimizer(run: "Run") -> None:
    """Check that the workload takes local steps where the run's optimizer leaves them to it."""
    optimizer, where = run.llm.optimizer, ("model", "LLM", "optimizer")
    inner, steps_by = getattr(optimizer, "inner", None), workload_of(run).inner
    if isinstance(optimizer, OptimizerWorkload):
        raise wrong(where, "an optimizer with local steps, with Workload as its inner one")
    its_own = isinstance(inner, OptimizerWorkload)
    if its_own != (steps_by != "gradient"):
        text = "Workload" if not its_own else "an optimizer of Lockstep"
        text += f' with workload.inner = "{steps_by}"'
        raise wrong((*where, optimizer.tag(), *(["inner"] if inner else [])), text)
    if its_own and isinstance(optimizer, Fragmented):
        text = "another optimizer with inner = Workload: fragments are adopted between local steps"
        raise wrong(where, text)
