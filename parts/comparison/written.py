"""A comparison for people and programs, in data/compare/: Markdown, a page, CSV, JSON and plots."""

import base64
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import shown
from lockstep.files import write_bytes, write_json, write_text
from parts.comparison.compare_file import NO_FAILURE, Compare
from parts.comparison.plan_file import name_of, table_path
from parts.comparison.plot import draw
from parts.comparison.table import Row, record
from parts.comparison.table_text import conclusions, made_of, tables
from pipeline.pages.templates import fill

TEMPLATE = "methods.html.jinja"


def write(file: Path, compare: Compare, table: Sequence[Row], code: str) -> list[Path]:
    """Write the table in each form, and the plots; return the files.

    Args:
      file: The comparison's own file, for which they are named.
      compare: The comparison.
      table: Its rows.
      code: What stands for the code that trained, for people.
    """
    records = [record(row, table) for row in table]
    png = draw([row for row in table if row.failure == NO_FAILURE])
    files = [table_path(file, ending) for ending in (".md", ".html", ".csv", ".json", ".png")]
    write_text(files[0], "\n".join(markdown(compare, table, code)) + "\n")
    write_text(files[1], page(compare, table, code, png))
    write_text(files[2], _csv(records))
    write_json(files[3], {"file": name_of(file), "code": code, "rows": records})
    write_bytes(files[4], png)
    return files


def markdown(compare: Compare, table: Sequence[Row], code: str) -> Iterator[str]:
    """Yield the lines of the tables for people, and what may be concluded from them."""
    yield shown(made_of(compare, code))
    for heads, rows in tables(compare, table):
        yield ""
        yield f"| {' | '.join(map(_cell, heads))} |"
        yield f"|{'---|' * len(heads)}"
        for row in rows:
            yield f"| {' | '.join(map(_cell, row))} |"
    yield ""
    for line in conclusions(compare, table):
        yield f"- {shown(line)}"


def _cell(text: str) -> str:
    """Return the text of a cell, which begins no other and steers no terminal."""
    return shown(text).replace("|", r"\|")


def page(compare: Compare, table: Sequence[Row], code: str, png: bytes) -> str:
    """Return the same in HTML, with the plots in it."""
    return fill(
        TEMPLATE,
        made_of=made_of(compare, code),
        plots=f"data:image/png;base64,{base64.b64encode(png).decode()}",
        tables=list(tables(compare, table)),
        conclusions=list(conclusions(compare, table)),
    )


def _csv(records: Sequence[dict[str, Any]]) -> str:
    """The records but for the keys of their trainings."""
    text = io.StringIO()
    names = [name for name in records[0] if name != "trainings"]
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
