"""The command `lockstep new`: what it asks, says and writes."""

import re
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import lockstep
from lockstep.errors import LockstepError
from pipeline.command_options import DEFAULT_ROOT, RUN_FILES, Root, count, refuse

if TYPE_CHECKING:
    from pipeline.preflight.model import StartingModel
    from pipeline.runfile.derived_run import Reasons

app = typer.Typer()

# As the cards' files name them, since --help imports no tables.
METHODS = Path(lockstep.__file__).parent / "methods"
OPTIMIZERS = sorted(
    name
    for file in METHODS.glob("*.py")
    for name in re.findall(r'\bCard\(\s*"([^"]+)"', file.read_text(encoding="utf-8"))
)
MOST_PEERS = 256

# In the order in which they are asked: the question, and the answer by default.
QUESTIONS = {
    "file": ("The run file to write", "params/mine.toml"),
    "model": ("Model: a folder, owner/name on the hub, or init:SIZE", "init:2m"),
    "data": ("Data: a folder, owner/name on the hub, an address, or corpus", "corpus"),
    "optimizer": (f"Optimizer: {', '.join(OPTIMIZERS)}", "diloco"),
    "tokens": ("Tokens to train on", "1e6"),
    "peers": ("Peers", 4),
    "gpus": ("GPUs here, 0 for none", 0),
}
BY_DEFAULT = {"peers": 4, "gpus": 0}
NO_ANSWERS = ("context", "like", "force", "root")  # what says how the file is written
Answers = dict[str, Any]


@app.command(rich_help_panel=RUN_FILES)
def new(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="The run file to write.")] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face folder, owner/name on the hub, or init:SIZE.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="A folder of text or tokens, owner/name, an address, or corpus."),
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"One of {', '.join(OPTIMIZERS)}.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, as 100M or 1e9.")] = None,
    peers: Annotated[
        int | None, typer.Option(min=1, max=MOST_PEERS, help="Peers; by default 4.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs; by default none, a CPU.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A model of your own in workloads/, for --model."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="JSON", help="What the workload is called with.")
    ] = None,
    worker_python: Annotated[
        str | None, typer.Option(help="The workload's Python; by default this one.")
    ] = None,
    inner: Annotated[
        Literal["gradient", "worker"] | None,
        typer.Option(help="Who takes local steps: Lockstep on its gradients, or the workload."),
    ] = None,
    passes: Annotated[
        int | None, typer.Option(parser=count, help="Over a workload's data; by default 10.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(parser=count, help="In tokens; by default the model's, to 2048.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(parser=count, help="Sequences of a round, over all peers.")
    ] = None,
    uplink: Annotated[
        float | None, typer.Option(min=0.001, help="A peer's upload, in megabits per second.")
    ] = None,
    downlink: Annotated[
        float | None, typer.Option(min=0.001, help="A peer's download, in megabits per second.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=1e-9, help="The highest one; by default as stated for a model of the nearest size."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="Of weights, data and peers.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the exported weights; by default the model's own."),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="A run file whose tokens, model and data it keeps.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Write a run file whose numbers fit each other, and say why each has its value.

    Example: lockstep new mine.toml --model init:2m --data ./texts --optimizer distro --tokens 1e6
    """
    answers = {name: value for name, value in locals().items() if name not in NO_ANSWERS}
    _make(context, answers, like, root, force)


def _make(
    context: typer.Context, answers: Answers, like: Path | None, root: Path, force: bool
) -> None:
    """Ask for what a new run file lacks, and write it."""
    from parts.new.run_tables import checked
    from parts.new.starting_model import model_named

    model_of = cache(partial(model_named, root=root))

    def check(name: str, answer: Any, answers: Answers) -> Any:
        if name == "file":
            return _new_file(answer, force)
        return checked(name, answer, answers, model_of)

    needed = QUESTIONS if like is None else ("file", "optimizer")
    if answers["workload"] and like is None:
        needed, answers["optimizer"] = ("file", "peers"), answers["optimizer"] or "diloco"
    answers = _ask_missing(answers, needed, check)
    answers["file"] = _new_file(answers["file"], force)
    if like is not None:
        alone = answers.keys() - {"file", "optimizer"}
        refuse(context, alone, "with --like, whose run has its own")
        _write_like(answers, like, root)
    elif answers["workload"]:
        refuse(context, ("model", "gpus", "dtype"), "with --workload")
        _write_workload(answers, root)
    else:
        refuse(context, ("config", "worker_python", "inner", "passes"), "without --workload")
        _write_new(answers, model_of(answers["model"]), root)


def _new_file(answer: str | Path, force: bool) -> Path:
    from lockstep.files import named_place
    from pipeline.stage.untrusted_files import expand

    path = expand(str(answer), "FILE")
    if named_place(path).exists() and not force:
        raise LockstepError(f"{answer}: exists, expected a new file, or --force")
    return path


def _ask_missing(answers: Answers, needed: Iterable[str], check: Callable) -> Answers:
    """Ask for a new run's missing answers in a terminal; again after an impossible one."""
    missing = [name for name in needed if answers[name] is None]
    if not sys.stdin.isatty():
        needs = [name for name in missing if name not in BY_DEFAULT]
        if needs:
            flags = ", ".join("FILE" if name == "file" else f"--{name}" for name in needs)
            raise LockstepError(
                f"lockstep new: missing {flags}, expected these, or a terminal in which to ask"
            )
        return answers | {name: BY_DEFAULT[name] for name in missing}
    for name in needed:
        is_possible = partial(check, name, answers=answers)
        if name not in missing:
            is_possible(answers[name])
            continue
        question, default = QUESTIONS[name]
        try:
            answer = typer.prompt(question, default=default, value_proc=_refused_by(is_possible))
        except typer.Abort as error:
            raise LockstepError(
                "lockstep new: stopped before the last answer, wrote nothing"
            ) from error
        answers = answers | {name: answer}
    return answers


def _refused_by(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a new run's callback for an answer; the prompt asks again if `check` refuses it."""

    def checked(answer: str) -> Any:
        try:
            return check(answer)
        except LockstepError as error:
            raise typer.BadParameter(str(error)) from error

    return checked


def _write_new(answers: Answers, model: "StartingModel", root: Path) -> None:
    from parts.new import run_tables, time_limits

    new = run_tables.new_run(answers, model)
    document, reasons = run_tables.tables(new), run_tables.reasons(new)
    reasons |= time_limits.times_that_fit(document, model.config, one_epoch=True)
    reasons |= run_tables.bits_that_audit(document, model.config)
    head = [
        f"Made by `lockstep new` with --optimizer {answers['optimizer']} "
        f"--tokens {answers['tokens']} --peers {new.peers} --gpus {new.gpus}.",
        f"Model: {model.label}; {model.params:,} params.",
        f"Data: {new.data.label}.",
    ]
    _write(answers["file"], root, document, model.config, reasons, head)


def _write_workload(answers: Answers, root: Path) -> None:
    from parts.new import time_limits, workload_run

    new, document, reasons = workload_run.new_run(answers, root)
    reasons |= time_limits.times_that_fit(document, new.model.config, one_epoch=True)
    head = [
        f"Made by `lockstep new` with --workload {answers['workload']}.",
        f"Model: {new.model.label}; {new.model.params:,} params that travel.",
        f"Data: {new.data.label}.",
    ]
    _write(answers["file"], root, document, new.model.config, reasons, head)


def _write_like(answers: Answers, like: Path, root: Path) -> None:
    from parts.new.run_tables import card_named
    from parts.new.time_limits import times_that_fit
    from pipeline import runfile
    from pipeline.preflight.model import model_of_run
    from pipeline.runfile.derived_run import tables_like
    from pipeline.subject import check_language_model

    card, base = card_named(answers["optimizer"]), runfile.load(like)
    check_language_model(base, f"--like {like}")
    head = [f"Made by `lockstep new`: as {like}, with --optimizer {answers['optimizer']}."]
    try:
        model = model_of_run(base, root)
    except LockstepError as error:  # its tokens are known all the same
        model = None
        head.append(f"{error}.")
    if model is None:
        document, reasons = tables_like(base, card, None)
        head.append(
            "Its model is not known before stage convert, so times and the rate are not fitted to "
            "it: see `lockstep check` then."
        )
    else:
        document, reasons = tables_like(base, card.for_groups(model.groups), model.params)
        reasons |= times_that_fit(document, model.config, one_epoch=False)
    _write(answers["file"], root, document, model and model.config, reasons, head)


def _write(
    file: Path,
    root: Path,
    document: dict[str, Any],
    config: dict[str, Any] | None,
    reasons: "Reasons",
    head: list[str],
) -> None:
    """Write a new run file, and print what was chosen and what plan and check report on it."""
    from lockstep.files import write_named
    from pipeline import runfile
    from pipeline.preflight import commands as preflight
    from pipeline.preflight.plan import plan_of
    from pipeline.runfile.as_text import run_file, toml
    from pipeline.runfile.derived_run import CALLED
    from pipeline.stage import logs
    from pipeline.toml_file import merged, value_at

    run = runfile.parse(document, CALLED)
    tables = merged(document, run.model_dump(mode="json", exclude_none=True))  # lacks some defaults
    chosen = []
    for key, why in reasons.items():
        value = value_at(tables, key)
        setting = key if isinstance(value, dict) else f"{key} = {toml(value)}"
        chosen.append(f"{setting}: {why}.")
    plan_lines = plan_of(run, config).lines() if config else []
    notes = {key: f"Chosen: {why}." for key, why in reasons.items()}
    write_named(file, run_file(run, *head, "Chosen, and why:", *chosen, notes=notes))
    for line in (*head, *chosen, *plan_lines):
        logs.say(line)
    failing = preflight.show(file, root)
    then = f"make repro RUN={file}" if Path("Makefile").is_file() else f"lockstep plan --run {file}"
    if failing:
        then = f"lockstep check --run {file}, since the run would fail by {failing} of these rows"
    logs.say(f"new: {file}; next: {then}")
