"""Options of commands: those that several have, how a value is read, and when one applies.

Nothing heavy is imported before a command runs.
"""

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Collection
from contextlib import suppress
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lockstep.errors import RequestError, brief
from pipeline.stage.keys import RUN_FILE

RunFile = Annotated[Path, typer.Option("--run", help="The run file.")]
Root = Annotated[Path, typer.Option("--root", help="The folder where data/ and metrics/ lie.")]
DEFAULT_RUN, DEFAULT_ROOT = Path(RUN_FILE), Path()
MaxGb = Annotated[
    int, typer.Option(min=1, max=10**6, help="The most that a stranger's files may have together.")
]
MOST_GB = 4

# Panels of `lockstep --help`. A command names its own, so a part's stand there too.
STAGES_IN_ORDER = "Stages, in their order"
IN_PROGRESS = "A run in progress"
RESULTS = "Results"
RUN_FILES = "Run files"

WORD_DIGITS = 16  # of a reader's word, at least: 64 bits
REPEATED = 4  # steps in a row that came before; of 1,000 random words of 16 digits one has some


def check_word(word: str | None) -> None:
    """Check that nobody can guess the word that a reader draws windows with, if there is one.

    Whoever guesses it knows which windows are never repeated. Only what a generator printed can be
    counted, since nobody knows how many words people choose from: hexadecimal digits, letters and
    decimals among them, as neither words nor times have. Dashes, as in a UUID, do not count. Where
    the steps from each digit to the next are as they were before, the digits repeat or count, and
    are not random. No rule sees that somebody else knows a word, or made it of another.

    Call it where a command takes a word of its reader's, before anything is drawn or fetched. The
    seeds of a run file are not such words.

    Raises:
      RequestError: The word has fewer than `WORD_DIGITS` random digits.
    """
    if word is None:
        return
    digits, why = word.replace("-", ""), "no hexadecimal number with digits and letters"
    if re.fullmatch(r"(?=.*[0-9])(?=.*[a-fA-F])[0-9a-fA-F]+", digits):
        steps = [(int(b, 16) - int(a, 16)) % 16 for a, b in pairwise(digits)]
        seen, old = set[tuple[int, ...]](), set[int]()
        for at in range(len(steps) - REPEATED + 1):
            run = tuple(steps[at : at + REPEATED])
            old |= {*range(at, at + REPEATED)} if run in seen else set()
            seen.add(run)
        if len(digits) - len(old) >= WORD_DIGITS:
            return
        why = f"{len(digits) - len(old)} digits that neither repeat nor count"
    raise RequestError(
        f"--seed {brief(repr(word))}: {why}, expected {WORD_DIGITS} or more that nobody can "
        "guess, such as `openssl rand -hex 16` prints"
    )


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
NUMBER = re.compile(r"((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e\+?\d{1,3})?)([kmgbt]?)")
AS_WRITTEN = "as 5000, 100k, 1.5M, 1B or 1e9"


def number_of(text: str) -> float:
    """Return an option's number of things as people write it, AS_WRITTEN; else NaN."""
    match = NUMBER.fullmatch(text.strip().lower().replace("_", ""))
    return float(Decimal(match[1].replace(",", "")) * UNITS[match[2]]) if match else math.nan


def whole(text: str) -> int:
    """Return an option's whole number of things, as `number_of` reads it, to argparse."""
    number = number_of(text)
    if not number < 1e30 or number % 1:
        raise ArgumentTypeError(f"{text}, expected a whole number, {AS_WRITTEN}")
    return int(number)


def count(text: object) -> int:
    """Return an option's number of things, at least 1, as `number_of` reads it."""
    with suppress(ArgumentTypeError):
        if number := whole(str(text)):
            return number
    raise typer.BadParameter(f"{text}, expected a whole number, {AS_WRITTEN}")


def refuse(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse options of a command line that nothing would read `why`, as in with --of merge."""
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "")
        if option.name in names and given and given.name == "COMMANDLINE":
            value = context.params[option.name]
            values = value if isinstance(value, list) else [] if value is True else [value]
            found = " ".join([option.opts[0], *map(str, values)])
            raise RequestError(f"{brief(found, 200)}: expected none {why}")


class Commands(TyperGroup):
    """Commands whose --help names no type for a flag, and whose numbers are finite."""

    def get_params(self, ctx: typer.Context) -> list:
        """Return the options of the group of commands itself."""
        return _refined(super().get_params(ctx))

    def get_command(self, ctx: typer.Context, cmd_name: str) -> TyperCommand | None:
        """Return the command of a name in the group."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _refined(command.get_params(ctx))
        return command


def _refined(options: list) -> list:
    for option in options:
        if getattr(option, "is_flag", False):
            option.metavar = ""
        option.callback = option.callback or _finite
    return options


def _finite(context: typer.Context, option: Any, value: Any) -> Any:
    """Return an option's value: no number is below NaN, and so none is out of its range."""
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{value}, expected a finite number", context, option)
    return value
