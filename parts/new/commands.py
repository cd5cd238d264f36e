"""The command `lockstep new`: what it asks, says and writes."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lockstep.errors import LockstepError
from pipeline.command_line import DEFAULT_ROOT, RUN_FILES, Root

if TYPE_CHECKING:
    from parts.new.answers import Checks, NewAnswers
    from parts.new.fitting import Choice
    from pipeline.preflight.model import StartingModel

app = typer.Typer()

# Written out, since --help imports no tables: tests/parts/new/test_new.py compares both with these.
OPTIMIZERS = (
    "ada-distro",
    "adamw",
    "decoupled-diloco",
    "demo",
    "diloco",
    "distro",
    "fedavg",
    "muon",
    "sgd",
    "sparseloco",
    "sparta",
    "sparta-diloco",
    "streaming-diloco",
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


@app.command(rich_help_panel=RUN_FILES)
def new(  # noqa: PLR0913 - each is an option
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
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, as 1e9.")] = None,
    peers: Annotated[
        int | None, typer.Option(min=1, max=MOST_PEERS, help="Peers; by default 4.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs; by default none, a CPU.")] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; by default the model's.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a round, over all peers.")
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
    values = locals()
    from parts.new.answers import Checks, NewAnswers

    given = NewAnswers(**{name: values[name] for name in NewAnswers._fields})
    checks = Checks(root, force)
    given = _asked(given, checks, QUESTIONS if like is None else ("file", "optimizer"))
    checks.file(given, given.file)
    if like is not None:
        _check_alone(given)
        _write_like(given, like, root)
    else:
        _write_new(given, checks.model_of(given.model), root)


def _asked(given: "NewAnswers", checks: "Checks", needed: Iterable[str]) -> "NewAnswers":
    """Ask for missing answers, in a terminal; ask again after an impossible one.

    Raises:
      LockstepError: An answer is missing without a terminal to ask in, or impossible.
    """
    missing = [name for name in needed if getattr(given, name) is None]
    if not sys.stdin.isatty():
        needs = [name for name in missing if name not in BY_DEFAULT]
        if needs:
            flags = ", ".join("FILE" if name == "file" else f"--{name}" for name in needs)
            raise LockstepError(f"lockstep new: {flags} missing, expected it, or a terminal to ask")
        return given._replace(**{name: BY_DEFAULT[name] for name in missing})
    for name in needed:
        check = partial(getattr(checks, name), given)
        if name not in missing:
            check(getattr(given, name))
            continue
        question, default = QUESTIONS[name]
        try:
            answer = typer.prompt(question, default=default, value_proc=_refused_by(check))
        except typer.Abort as error:
            raise LockstepError(
                "lockstep new: stopped; expected an answer, wrote nothing"
            ) from error
        given = given._replace(**{name: answer})
    return given


def _refused_by(check: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what a prompt calls with an answer, which asks again where `check` refuses it."""

    def checked(answer: str) -> Any:
        try:
            return check(answer)
        except LockstepError as error:
            raise typer.BadParameter(str(error)) from error

    return checked


def _check_alone(given: "NewAnswers") -> None:
    """Check that nothing is given that `--like` keeps."""
    for name, value in given._asdict().items():
        if name not in ("file", "optimizer") and value is not None:
            flag = name.replace("_", "-")
            raise LockstepError(f"--{flag}: expected none with --like, whose run has its own")


def _write_new(given: "NewAnswers", model: "StartingModel", root: Path) -> None:
    from parts.new import fitting, fresh
    from parts.new.answers import new_run

    asked = new_run(given, model)
    document, choices = fresh.tables(asked), fresh.choices(asked)
    choices += fitting.times_that_fit(document, model.config, one_epoch=True)
    head = [
        f"Made by `lockstep new` with --optimizer {given.optimizer} --tokens {given.tokens} "
        f"--peers {given.peers} --gpus {given.gpus}.",
        f"Model: {model.said}; {model.params:,} params.",
        f"Data: {asked.data.said}.",
    ]
    _write(given.file, root, document, model.config, choices, head)


def _write_like(given: "NewAnswers", like: Path, root: Path) -> None:
    from parts.new import fitting
    from parts.new.answers import card_named
    from parts.new.like import check_base, tables_like
    from pipeline import runfile
    from pipeline.preflight.model import model_of_run

    card, base = card_named(given.optimizer), runfile.load(like)
    check_base(base, like)
    head = [f"Made by `lockstep new`: as {like}, with --optimizer {given.optimizer}."]
    try:
        model = model_of_run(base, root)
    except LockstepError as error:  # its tokens are known all the same
        model = None
        head.append(f"{error}.")
    if model:
        card = card.for_groups(model.groups)
    document, choices = tables_like(base, card, model)
    config = model.config if model else None
    if config:
        choices += fitting.times_that_fit(document, config, one_epoch=False)
    if config is None:
        head.append(
            "Its model is not known before stage convert, so times and the rate are not fitted to "
            "it: see `lockstep check` then."
        )
    _write(given.file, root, document, config, choices, head)


def _write(
    file: Path,
    root: Path,
    document: dict[str, Any],
    config: dict[str, Any] | None,
    choices: list["Choice"],
    head: list[str],
) -> None:
    """Write a run file, and say what was chosen, and what plan and check say of it."""
    from lockstep.files import write_text
    from parts.new.fitting import CALLED, value_at
    from pipeline import runfile
    from pipeline.preflight import commands as preflight
    from pipeline.preflight.plan import plan_of
    from pipeline.runfile.importer import run_file, toml
    from pipeline.stage import logs

    run = runfile.parse(document, CALLED)
    tables = run.model_dump(mode="json", exclude_none=True)
    said = []
    for key, why in choices:
        found = value_at(tables, key)
        named = key if isinstance(found, dict) else f"{key} = {toml(found)}"
        said.append(f"{named}: {why}.")
    planned = plan_of(run, config).lines() if config else []
    file.parent.mkdir(parents=True, exist_ok=True)
    notes = {key: f"Chosen: {why}." for key, why in choices}
    write_text(file, run_file(run, *head, "Chosen, and why:", *said, notes=notes))
    for line in (*head, *said, *planned):
        logs.say(line)
    failing = preflight.show(file, root)
    logs.say(f"new: {file}{f'; it would fail here by {failing} of these rows' if failing else ''}")
