"""`lockstep generate`: an exported model continues prompts, or each line of standard input.

Nothing heavy is imported before the command runs.
"""

import io
import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import LockstepError, shown
from pipeline.command_options import count, refuse

if TYPE_CHECKING:
    from pipeline.language_model.continuations import Continuations

EXPORT = Path("data/export")
COMPILED = Path("data/store/compiled")  # where the stages of this folder keep programs, if any ran
FROM_STDIN = "-"


def generate(  # noqa: PLR0913 - each is an option
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="An exported folder.")] = EXPORT,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Texts to continue; -: standard input. None: each line that is typed."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(parser=count, help="Most tokens to write.")] = 64,
    temperature: Annotated[
        float, typer.Option(min=0, max=1e6, help="Divides the logits; 0: the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="Draw from so many likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(min=1e-9, max=1, help="Draw from the likeliest of this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the draws.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Continue texts with an exported model; without PROMPTS, each line of standard input."""
    if not temperature:
        refuse(context, ("top_k", "top_p", "seed"), "with --temperature 0, which draws nothing")
    from lockstep.machine import allocator
    from pipeline.stage import devices

    allocator.tune()
    devices.prepare_alone()
    if COMPILED.is_dir():
        devices.keep_compiled(COMPILED)
    from pipeline.language_model.continuations import Continuations  # imports JAX
    from pipeline.language_model.sampling import Sampling

    model = Continuations(folder, max_new_tokens, Sampling(temperature, top_k, top_p), seed)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # `_unicode` says what is none
    if not prompts:
        _converse(model, as_json)
        return
    prompts = [_unicode(sys.stdin.read() if p == FROM_STDIN else p) for p in prompts]
    if len(prompts) == 1 and not as_json:
        _stream(model, prompts[0])
        return
    for number, result in enumerate(model.generate(prompts)):
        if as_json:
            print(json.dumps(result))
        else:
            _say("\n" * (number > 0) + result["prompt"] + result["text"] + "\n")


def _converse(model: "Continuations", as_json: bool) -> None:
    """Continue each line of standard input, until it ends; Ctrl-C stops the text only."""
    marker = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401 - lines can be edited, and called back

        marker = "> "
    while (line := _read(marker)) is not None:
        try:
            _unicode(line)
            if as_json:
                print(json.dumps(*model.generate([line])), flush=True)
            else:
                _stream(model, line)
        except LockstepError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)


def _unicode(text: str) -> str:
    """Return a prompt after a check that it is Unicode, which can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = text[error.start].encode("unicode_escape").decode()
        raise LockstepError(
            f"the prompt has {character} at character {error.start}, expected UTF-8"
        ) from None
    return text


def _read(marker: str) -> str | None:
    """Return the next line to continue, or None after the last; Ctrl-C begins the line again."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                return input(marker)
            except KeyboardInterrupt:
                print()
            except EOFError:
                print(end="\n" if marker else "")
                return None
    finally:
        signal.signal(signal.SIGINT, before)


def _stream(model: "Continuations", prompt: str) -> None:
    from pipeline.stage import signals

    with signals.stopping() as exit_status:
        for text in model.stream(prompt):
            if exit_status():
                break
            _say(text)
    _say("\n")
    if exit_status() not in (0, 128 + signal.SIGINT):
        sys.exit(exit_status())


def _say(text: str) -> None:
    """Print a generated text; nothing in it steers the terminal."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" else shown(c) for c in text)
    print(text, end="", flush=True)
