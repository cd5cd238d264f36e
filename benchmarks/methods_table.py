"""Write what README and RESULTS say of methods, from the committed results of comparisons.

python -m benchmarks.methods_table [data/compare/NAME]

Between `<!-- methods-failures: losses -->` and `<!-- end -->` stands what this makes of
benchmarks/methods-failures.seeds.csv. With the table of a comparison, its results and its file in
params/ replace benchmarks/methods.* first. The picture is drawn anew.
"""

import csv
import re
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lockstep.files import write_bytes, write_text
from lockstep.tables.validation import validate
from parts.comparison import compare_file, output_files, picture
from parts.comparison.compare_file import NO_FAILURE, Compare
from parts.comparison.pairs import Difference, differences
from parts.comparison.results_table import (
    Row,
    at_equal_loss,
    conclusions,
    plain_rows,
    record,
    row_pairs,
    tables,
    unbeaten,
    whole_gradients,
)
from parts.comparison.search import Found
from pipeline import runfile
from pipeline.stage.keys import PROJECT
from pipeline.toml_file import read_toml

FOLDER = PROJECT / "benchmarks"
PAGES = PROJECT / "README.md", FOLDER / "RESULTS.md"
Key = tuple[str, str]  # a method, and what fails
MARKS = ("method", "failure", "seed")
FEW = 0.1  # bits per parameter and step, of the method that README's first sentence is about
MOST = 8  # rows that a reader of the picture takes in; of more, README's
SHOWN = ("muon", "adamw", "adamw-one", "diloco-muon", "diloco-muon-signs", "sparseloco-muon")
SHOWN += ("distro", "distro-one")
GONE = "ada-distro"  # a recipe of the table's code that later code lacks; no table reads it
OMITTED = "stated", "bits received", "hours for the same tokens", "tokens per second", "memory"
FIRST = (
    "For the same loss, the best training with whole gradients sends {bytes} times as many bytes, "
    "and reads {tokens} of the tokens"
)
RECORD = {  # what results call the columns of a record
    "outer_steps": "rounds",
    "bytes_up_a_round": "bytes_up",
    "bytes_down_a_round": "bytes_down",
    **{name: name for name in ("parameters", "tokens_per_second", "peak_bytes")},
}
SECTION = re.compile(r"(<!-- (methods[\w-]*): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def lines(name: str) -> list[dict[str, str]]:
    """Return the lines of a committed file of results."""
    with open(FOLDER / name, newline="") as file:
        return list(csv.DictReader(file))


def compared(name: str = "methods") -> Compare:
    """Return the comparison of committed results."""
    if name != "methods":
        return compare_file.load(PROJECT / f"params/{name.replace('methods', 'compare', 1)}.toml")
    document = read_toml(FOLDER / "methods.toml")
    for method in document["methods"].values():
        if method["recipe"] == GONE:
            method["recipe"] = "distro"
            method.pop("ours", None)
    return validate(Compare, document, "methods.toml")


def rows() -> list[Row]:
    """Return the rows of methods.csv with the seeds and the curves beside it, the best first."""
    compare, seeds, curves = compared(), lines("methods.seeds.csv"), lines("methods.curves.csv")
    found = []
    for row in lines("methods.csv"):
        shared = {name: _number(row[column]) for column, name in RECORD.items()}
        ended = []
        for seed in (one for one in seeds if one["method"] == row["method"]):
            curve = [
                {name: float(value) for name, value in point.items() if name not in MARKS}
                for point in curves
                if all(point[name] == seed[name] for name in MARKS)
            ]
            own = {name: _number(seed.get(name, "")) for name in output_files.MEASURED}
            measured = _number(row["held_out_rows"]), _number(row["split_rows"])
            ended.append(shared | own | {"held_out_rows": measured, "curve": curve})
        values = {
            kind: {
                name.removeprefix(f"{kind}_"): float(value)
                for name, value in row.items()
                if name.startswith(f"{kind}_") and value
            }
            for kind in ("tuned", "stated")
        }
        search = Found(values["tuned"] | values["stated"], [*values["tuned"]], row["edge"].split())
        label, steps = compare.methods[row["method"]].label, int(row["local_steps"])
        name = row["method"]
        found.append(Row(name, label or name, row["failure"], steps, search, tuple(ended)))
    return sorted(found, key=lambda row: row.mean)


def _number(text: str) -> float | None:
    if not text:
        return None
    return int(text) if text.isdigit() else float(text)


def first_sentence() -> str:
    """Return what README's first sentence has of the best method of at most 0.1 bit."""
    table = rows()
    few = [row for row in table if (row.bits("bytes_up") or 1) <= FEW]
    found = at_equal_loss(few[0], whole_gradients(table))
    fewer, share = (found[f"equal_loss_{name}_ratio"] or 0.0 for name in ("bytes_up", "tokens"))
    return FIRST.format(bytes=f"{fewer:.0f}", tokens=f"{share:.2f}")


# ---- The sections of the pages ----


def table(name: str) -> Iterator[str]:
    """Yield the whole table of methods.csv, and what may be concluded."""
    compare, all_rows = compared(), rows()
    (heads, cells), *_ = tables(compare, all_rows)
    kept = [n for n, head in enumerate(heads) if head not in OMITTED]
    yield from _markdown([heads[n] for n in kept], [[row[n] for n in kept] for row in cells])
    yield ""
    yield from (f"- {line}" for line in conclusions(compare, all_rows))


def short(name: str) -> Iterator[str]:
    """Yield README's table: losses, bytes, and what whole gradients need for the same loss."""
    compare, all_rows = compared(), rows()
    best = unbeaten(all_rows, row_pairs(compare, all_rows))
    reference = whole_gradients(all_rows)
    cells = []
    for row in all_rows:
        if row.method in SHOWN:
            loss = f"{row.mean:.3f} ± {row.spread:.3f}"
            needs = at_equal_loss(row, reference)
            ratios = [needs[f"equal_loss_{name}_ratio"] for name in ("bytes_up", "tokens")]
            cells.append(
                (
                    row.label,
                    f"**{loss}**" if row in best else loss,
                    f"{row.bits('bytes_up'):.2g}",
                    *("–" if ratio is None else f"{ratio:.3g}" for ratio in ratios),
                )
            )
    heads = ("method", "held-out loss", "bits per parameter and step")
    yield from _markdown((*heads, "bytes at equal loss", "tokens at equal loss"), cells)


def losses(name: str) -> Iterator[str]:
    """Yield the losses of methods by what fails: means, ± standard deviations of seeds."""
    failures, by_row = _by_row(name)
    yield from _grid(name, failures, {key: _loss(seeds) for key, seeds in by_row.items()})


def added(name: str) -> Iterator[str]:
    """Yield what each failure adds to the loss; in bold what a test of all tells apart."""
    failures, by_row = _by_row(name)
    methods = dict.fromkeys(method for method, _ in by_row)
    pairs = [((m, NO_FAILURE), (m, f)) for f in failures[1:] for m in methods]
    yield from _differences(name, failures[1:], by_row, pairs)


def rules(name: str) -> Iterator[str]:
    """Yield how much higher the loss of each rule is than the mean's, by what fails."""
    failures, by_row = _by_row(name)
    others = [
        method for method in dict.fromkeys(method for method, _ in by_row) if method != "mean"
    ]
    pairs = [(("mean", failure), (m, failure)) for failure in failures for m in others]
    yield from _differences(name, failures, by_row, pairs)


def pairs(name: str) -> Iterator[str]:
    """Yield the losses of methods where nothing fails, and their differences, all tested."""
    by_row = {method: one for (method, _), one in _by_row(name)[1].items()}
    ordered = dict(sorted(by_row.items(), key=lambda item: statistics.fmean(item[1])))
    labels = _labels(name)
    found = differences(ordered)
    heads = ("method", "held-out loss", *(f"behind {labels[method]}" for method in [*ordered][:-1]))
    cells = {method: [labels[method], _loss(one)] for method, one in ordered.items()}
    for method in ordered:
        for other in [*ordered][:-1]:
            pair = next((p for p in found if (p.better, p.worse) == (other, method)), None)
            cells[method].append("" if pair is None else _bold(pair))
    yield from _markdown(heads, list(cells.values()))


def _by_row(name: str) -> tuple[list[str], dict[Key, list[float]]]:
    """Return the failures, and the losses of each row by seed."""
    by_row: dict[Key, list[float]] = {}
    for line in sorted(lines(f"{name}.seeds.csv"), key=lambda line: int(line["seed"])):
        by_row.setdefault((line["method"], line["failure"]), []).append(float(line["loss"]))
    return [*dict.fromkeys(failure for _, failure in by_row)], by_row


def _labels(name: str) -> dict[str, str]:
    methods = compared(name).methods
    return {key: method.label or f"`{key}`" for key, method in methods.items()}


def _grid(name: str, failures: Sequence[str], cells: dict[Key, str]) -> Iterator[str]:
    labels = _labels(name)
    heads = ["nothing fails" if failure == NO_FAILURE else failure for failure in failures]
    methods = dict.fromkeys(method for method, _ in cells)
    lines = [(labels[m], *(cells[m, failure] for failure in failures)) for m in methods]
    yield from _markdown(("method", *heads), lines)


def _differences(
    name: str, failures: Sequence[str], by_row: dict[Key, list[float]], pairs: list[tuple[Key, Key]]
) -> Iterator[str]:
    named = {" ".join(key): losses for key, losses in by_row.items()}
    found = differences(named, [(" ".join(a), " ".join(b)) for a, b in pairs])
    cells = {key: _bold(pair) for (_, key), pair in zip(pairs, found, strict=True)}
    yield from _grid(name, failures, cells)


def _loss(seeds: Sequence[float]) -> str:
    return f"{statistics.fmean(seeds):.3f} ± {statistics.stdev(seeds):.3f}"


def _bold(pair: Difference) -> str:
    if pair.low == pair.high:
        return "the same"
    return f"**{pair}**" if pair.told_apart else str(pair)


def _markdown(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    yield from (f"| {' | '.join(row)} |" for row in cells)


def filled(page: str) -> str:
    """Return a page with its sections and its first sentence made anew."""
    makers = (table, short, losses, added, rules, pairs)
    by_name = {maker.__name__: maker for maker in makers}

    def section(match: re.Match[str]) -> str:
        begin, name, kind, end = match.groups()
        return begin + "\n".join(by_name[kind](name)) + "\n" + end

    numbers = re.sub(r"\\{\w+\\}", r"[\\d.]*\\d", re.escape(FIRST))
    return re.sub(numbers, first_sentence(), SECTION.sub(section, page))


def derived() -> dict[str, str]:
    """Return the committed files that follow from others, and their content."""
    compare, all_rows = compared(), rows()
    records = [record(compare, row, all_rows) for row in plain_rows(all_rows)]
    told = [p._asdict() | {"told_apart": p.told_apart} for p in row_pairs(compare, all_rows)]
    as_csv = output_files.as_csv
    return {"methods.csv": as_csv(records), "methods.pairs.csv": as_csv(told)}


def drawn() -> bytes:
    """Return the picture of methods.csv."""
    all_rows, peers = rows(), runfile.load(PROJECT / compared().base).peers.count
    few = [row for row in all_rows if row.method in SHOWN]
    return picture.draw(few if len(all_rows) > MOST else all_rows, peers, "nats per token")


if __name__ == "__main__":
    for stem in map(Path, sys.argv[1:]):
        for ending in output_files.CSV:
            shutil.copy(f"{stem}{ending}", FOLDER / f"methods{ending}")
        shutil.copy(PROJECT / f"params/{stem.name}.toml", FOLDER / "methods.toml")
    for name, content in derived().items():
        write_text(FOLDER / name, content)
    for page in PAGES:
        write_text(page, filled(page.read_text(encoding="utf-8")))
    write_bytes(FOLDER / "methods.png", drawn())
