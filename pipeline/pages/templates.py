"""Templates, and how values are written in them: nothing that may be a credential or a folder."""

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lockstep.errors import without_credentials
from lockstep.machine.progress import size
from pipeline.audit import verdict_text
from pipeline.pages.stage_results import times

FILTERS = {
    "caught": verdict_text.caught,
    "peers": verdict_text.peers,
    "rounded": lambda number: f"{float(number):.3f}",
    "seed_origin": verdict_text.seed_origin,
    "size": size,
    "times": times,
    "who": verdict_text.who,
}


def environment(*folders: Path, escape: bool) -> Environment:
    """Return the environment that reads templates in some folders and beside this file.

    HTML needs values that are escaped.
    """
    env = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not escape,
    )
    env.filters |= FILTERS
    return env


def fill(template: str, **values: object) -> str:
    """Return a page in HTML; every value is escaped, and a missing one is an error."""
    return environment(escape=True).get_template(template).render(values) + "\n"


# ---- Texts of a user ----


def without_secrets(value: Any) -> Any:
    """Return a page's copy whose addresses have no user, password or query, maybe signed."""
    match value:
        case dict():
            return {key: without_secrets(inner) for key, inner in value.items()}
        case list():
            return [without_secrets(inner) for inner in value]
        case str():
            return without_credentials(value)
    return value


def without_folders(text: str) -> str:
    """Return text of the environment without absolute paths, as in --xla_dump_to=/home/me."""
    return re.sub(r"(?<![^\s='\":,])/[^\s'\",]+", "...", text)


def code(text: object) -> str:
    """Return a code span for a template's table cell, in which no text is markup."""
    shown = re.sub(r"[\n\t]", " ", verdict_text.printable(str(text)))
    longest = max(map(len, re.findall("`+", shown)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if shown[:1] in ("", "`") or shown[-1:] == "`" else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}".replace("|", r"\|")
