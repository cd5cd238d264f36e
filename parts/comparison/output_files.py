"""A comparison for people and programs, in data/compare/: Markdown, a page, CSV, JSON and plots."""

import base64
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import shown
from lockstep.files import write_bytes, write_json, write_text
from parts.comparison.compare_file import Compare
from parts.comparison.picture import draw
from parts.comparison.plan_file import name_of, table_path
from parts.comparison.results_table import (
    Row,
    conclusions,
    failure_costs,
    made_of,
    plain_rows,
    record,
    row_pairs,
    tables,
)
from parts.comparison.training_result import TRAINED
from parts.comparison.trainings import changed
from pipeline.pages.templates import fill
from pipeline.runfile import Run
from pipeline.subject import subject_of

CSV = (".csv", ".seeds.csv", ".pairs.csv", ".curves.csv", ".search.csv")
ENDINGS = (".md", ".html", ".json", ".png", *CSV)
MEASURED = ("loss", "held_out_stderr", "held_out_seen", "tokens", TRAINED, "simulated_seconds")
OF_A_SEED = (*MEASURED, "key", "params")
TEMPLATE = "methods.html.jinja"


def write(file: Path, compare: Compare, table: Sequence[Row], code: str, base: Run) -> list[Path]:
    """Write the comparison's table in each form, and the plots; return the files.

    They are named for `file`; `code` is what trained, for people, `base` the run of `compare.base`.
    """
    records = [record(compare, row, table) for row in table]
    compared = row_pairs(compare, table) + failure_costs(table)
    pairs = [{**pair._asdict(), "told_apart": pair.told_apart} for pair in compared]
    results = list(_results(compare, table))
    seeds = [names | {name: seed.get(name) for name in OF_A_SEED} for names, seed in results]
    curves = [names | measure for names, seed in results for measure in seed.get("curve", ())]
    search = [
        {"method": row.method, "training": number, **one}
        for row in plain_rows(table)
        for number, one in enumerate(row.found.tried, start=1)
    ]
    unit = subject_of(base).loss_unit
    png = draw(plain_rows(table), changed(base, compare).peers.count, unit)
    files = [table_path(file, ending) for ending in ENDINGS]
    made = made_of(compare, table, code, unit)
    write_text(files[0], "\n".join(markdown(made, compare, table)) + "\n")
    plots = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    text, last = [*tables(compare, table)], [*conclusions(compare, table)]
    page = fill(TEMPLATE, made_of=made, plots=plots, tables=text, conclusions=last)
    write_text(files[1], page)
    written = {"file": name_of(file), "code": code, "rows": records, "seeds": seeds, "pairs": pairs}
    write_json(files[2], written | {"search": search})
    write_bytes(files[3], png)
    for path, content in zip(files[4:], (records, seeds, pairs, curves, search), strict=True):
        write_text(path, as_csv(content))
    return files


def _results(compare: Compare, table: Sequence[Row]) -> Iterator[tuple[dict[str, Any], dict]]:
    """Yield the name and result of each compared training, one for each row and seed."""
    for row in table:
        for number, seed in zip(compare.seeds, row.seeds, strict=True):
            yield {"method": row.method, "failure": row.failure, "seed": number}, seed


def markdown(made: str, compare: Compare, table: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a comparison's Markdown: how it was `made`, the tables, conclusions."""
    yield shown(made)
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
    """Return a Markdown cell's text, which starts no other cell and steers no terminal."""
    return shown(text).replace("|", r"\|")


def as_csv(records: Sequence[dict[str, Any]]) -> str:
    """Return a comparison's records as CSV, with a column for each name that any of them has."""
    text = io.StringIO()
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()
