"""Draw benchmarks/methods.png, the README's methods, from the curves of the whole comparison.

python -m benchmarks.methods_picture
"""

import csv
import tomllib
from pathlib import Path

from lockstep.files import write_bytes
from parts.comparison import written
from parts.comparison.results_table import Row
from parts.comparison.search import Found
from pipeline.stage.keys import PROJECT

CURVES = PROJECT / "benchmarks/methods.curves.csv"
COMPARED = PROJECT / "benchmarks/methods.toml"
SHOWN = (
    "muon",
    "adamw-groups",
    "diloco-muon",
    "ada-distro",
    "diloco-muon-signs",
    "sparseloco-muon",
    "adamw",
    "distro",
)


def rows(curves: Path = CURVES) -> list[Row]:
    """Return the rows of the methods shown, the best first, with their curves and no more."""
    seeds: dict[str, dict[str, list]] = {name: {} for name in SHOWN}
    with open(curves, newline="") as lines:
        for line in csv.DictReader(lines):
            name, _, seed = line.pop("method"), line.pop("failure"), line.pop("seed")
            if name in seeds:
                point = {column: float(value) for column, value in line.items()}
                seeds[name].setdefault(seed, []).append(point)
    methods = tomllib.loads(COMPARED.read_text())["methods"]
    found = [
        Row(
            name, methods[name]["label"], "none", 1, Found({}), tuple(map(_ended, by_seed.values()))
        )
        for name, by_seed in seeds.items()
    ]
    return sorted(found, key=lambda row: row.mean)


def _ended(curve: list[dict]) -> dict:
    return {"loss": curve[-1]["loss"], "curve": curve}


if __name__ == "__main__":
    write_bytes(PROJECT / "benchmarks/methods.png", written.draw(rows()))
