"""The command `lockstep new`: what it asks, says and writes."""

import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from pipeline.command_line import DEFAULT_ROOT, Root
from pipeline.errors import LockstepError, shown

if TYPE_CHECKING:
    from pipeline.new.fitting import Choice
    from pipeline.runfile import Run
    from pipeline.swarm.plan import Footprint


class NewAnswers(NamedTuple):
    """What a user gave of a run that is new, or like another; None where it was not given."""

    file: Path | None
    model: str | None = None
    data: str | None = None
    optimizer: str | None = None
    tokens: str | None = None
    peers: int | None = None
    gpus: int | None = None
    length: int | None = None
    batch: int | None = None
    uplink: float | None = None
    downlink: float | None = None


# In the order in which they are asked: the question, and the answer by default.
QUESTIONS = {
    "file": ("The run file to write", "params/mine.toml"),
    "model": ("Model: a folder, owner/name on the hub, or init:SIZE", "init:2m"),
    "data": ("Data: a folder, owner/name on the hub, an address, or corpus", "corpus"),
    "optimizer": ("Optimizer", "diloco"),
    "tokens": ("Tokens to train on", "1e6"),
    "peers": ("Peers", 4),
    "gpus": ("GPUs here, 0 for none", 0),
}
BY_DEFAULT = {"peers": 4, "gpus": 0}
MOST_TOKENS = 1e15


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
        str | None, typer.Option(help="In lower case with hyphens: adamw, diloco, distro, ...")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, as 1e9.")] = None,
    peers: Annotated[int | None, typer.Option(min=1, max=256, help="Peers; by default 4.")] = None,
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
    like: Annotated[
        Path | None, typer.Option(help="A run file whose tokens, model and data it keeps.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Write a run file whose numbers fit each other, and say why each has its value."""
    given = NewAnswers(
        file, model, data, optimizer, tokens, peers, gpus, length, batch, uplink, downlink
    )
    given = _asked(given) if like is None else _asked(given, ("file", "optimizer"))
    if given.file.exists() and not force:
        raise LockstepError(f"{given.file}: exists, expected a new file, or --force")
    if like is not None:
        _check_alone(given)
        _write_like(given, like, root)
    else:
        _write_new(given, root)


def _asked(given: NewAnswers, needed: Iterable[str] = QUESTIONS) -> NewAnswers:
    """Ask for what is missing, in a terminal.

    Raises:
      LockstepError: Something is missing, and there is nobody to ask.
    """
    missing = [name for name in needed if getattr(given, name) is None]
    if not sys.stdin.isatty():
        needs = [name for name in missing if name not in BY_DEFAULT]
        if needs:
            flags = ", ".join("FILE" if name == "file" else f"--{name}" for name in needs)
            raise LockstepError(f"lockstep new: {flags} missing, expected it, or a terminal to ask")
        return given._replace(**{name: BY_DEFAULT[name] for name in missing})
    for name in missing:
        question, default = QUESTIONS[name]
        try:
            answer = typer.prompt(question, default=default)
        except typer.Abort as error:
            raise LockstepError(
                "lockstep new: stopped; expected an answer, wrote nothing"
            ) from error
        given = given._replace(**{name: Path(answer) if name == "file" else answer})
    return given


def _check_alone(given: NewAnswers) -> None:
    """Check that nothing is given that `--like` keeps."""
    for name, value in given._asdict().items():
        if name not in ("file", "optimizer") and value is not None:
            raise LockstepError(f"--{name}: expected none with --like, whose run has its own")


def _number(tokens: str) -> int:
    try:
        number = float(tokens.replace("_", "").replace(",", ""))
    except ValueError:
        number = 0.0
    if not 1 <= number <= MOST_TOKENS:
        raise LockstepError(f"--tokens {tokens}: expected a number from 1 to 1e15, as 1e9")
    return int(number)


def _write_new(given: NewAnswers, root: Path) -> None:
    from pipeline.new import fitting, fresh
    from pipeline.new.data_tables import data_named
    from pipeline.new.recipes import recipe_of
    from pipeline.new.starting_model import model_named

    recipe, tokens = recipe_of(given.optimizer), _number(given.tokens)
    model = model_named(given.model, root)
    data = data_named(given.data, model)
    asked = fresh.NewRun(
        model,
        data,
        recipe.for_groups(model.groups),
        tokens,
        given.peers,
        given.gpus,
        given.length,
        given.batch,
        given.uplink,
        given.downlink,
    )
    document, choices = fresh.tables(asked), fresh.choices(asked)
    choices += fitting.times_that_fit(document, model.config, one_epoch=True)
    head = [
        f"Made by `lockstep new` with --optimizer {given.optimizer} --tokens {given.tokens} "
        f"--peers {given.peers} --gpus {given.gpus}.",
        f"Model: {model.said}; {model.params:,} params.",
        f"Data: {data.said}.",
    ]
    _write(given.file, root, document, model.config, choices, head)


def _write_like(given: NewAnswers, like: Path, root: Path) -> None:
    from pipeline import runfile
    from pipeline.new import fitting
    from pipeline.new.like import check_base, tables_like
    from pipeline.new.recipes import recipe_of
    from pipeline.preflight.model import model_of_run

    recipe, base = recipe_of(given.optimizer), runfile.load(like)
    check_base(base, like)
    head = [f"Made by `lockstep new`: as {like}, with --optimizer {given.optimizer}."]
    try:
        model = model_of_run(base, root)
    except LockstepError as error:  # its tokens are known all the same
        model = None
        head.append(f"{error}.")
    if model:
        recipe = recipe.for_groups(model.groups)
    document, choices = tables_like(base, recipe, model)
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
    """Write a run file, and say what was chosen, and what `lockstep plan` says of it."""
    from pipeline import runfile
    from pipeline.new.fitting import CALLED, value_at
    from pipeline.runfile.importer import run_file, toml
    from pipeline.stage.artifacts import write_text
    from pipeline.swarm.plan import plan_of

    run = runfile.parse(document, CALLED)
    tables = run.model_dump(mode="json", exclude_none=True)
    said = []
    for key, why in choices:
        found = value_at(tables, key)
        named = key if isinstance(found, dict) else f"{key} = {toml(found)}"
        said.append(f"{named}: {why}.")
    planned = _planned(plan_of(run, config), run, root) if config else []
    file.parent.mkdir(parents=True, exist_ok=True)
    notes = {key: f"Chosen: {why}." for key, why in choices}
    write_text(file, run_file(run, *head, "Chosen, and why:", *said, notes=notes))
    enough = f"`lockstep download --dry-run --run {file}` says whether the data are enough"
    for line in (*head, *said, *planned, enough, f"new: {file}"):
        print(shown(line))


def _planned(footprint: "Footprint", run: "Run", root: Path) -> Iterator[str]:
    """What the run takes, and a warning where this machine has not that much memory or disk."""
    from pipeline.stage import memory
    from pipeline.stage.progress import size

    yield from footprint.lines()
    limit = memory.total() if run.runtime.memory_gb is None else run.runtime.memory_gb * 1e9
    if run.peers.attention != "cudnn" and footprint.state > limit:
        yield (
            f"warning: params and the optimizer's state of all peers are {size(footprint.state)}, "
            f"expected less than the {size(limit)} of memory here; fewer --peers have less"
        )
    disk = footprint.trained + footprint.checkpoints
    here = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
    if disk > (free := shutil.disk_usage(here).free):
        yield (
            f"warning: data/trained and data/runs take {size(disk)}, expected at most the "
            f"{size(free)} that are free here; a larger [witness] snapshot_every takes less"
        )
