"""Templates, and how the values in them are written."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

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
    """Return what reads the templates of some folders and those beside this file.

    HTML needs values that are escaped.
    """
    found = Environment(
        loader=FileSystemLoader([*folders, Path(__file__).parent]),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not escape,
    )
    found.filters |= FILTERS
    return found


def fill(template: str, **values: object) -> str:
    """Return a page in HTML; every value is escaped, and a missing one is an error."""
    return environment(escape=True).get_template(template).render(values) + "\n"
