"""data/compare/plan-DIGEST.json: the trainings of a comparison, by what their results depend on.

Snakemake reads it for each of its jobs, so nothing heavy is imported.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, expecting
from lockstep.files import read_json
from pipeline.stage.artifacts import read_sealed
from pipeline.stage.keys import PROJECT, digest_of_source
from pipeline.toml_file import chain, read_toml

COMPARE_FILE = Path("params/compare.toml")
FOLDER = Path("data/compare")
A_PLAN = "the trainings of the comparison; delete it to remake it"
CODE = (
    *("lockstep", "models", "pipeline", "parts", "workloads"),
    *("constraints.txt", "constraints-gpu.txt", "dvc.yaml"),
)


def plan_path(compare_file: Path = COMPARE_FILE) -> Path:
    """Return the path of a comparison's plan: another for another comparison, base or code."""
    base = Path(str(read_toml(compare_file).get("base", "")))
    content = [digest_of_source(PROJECT / name) for name in CODE]
    files = compare_file, *(chain(base) if base.is_file() else ())
    content += [path.read_bytes().hex() for path in files]
    return FOLDER / f"plan-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]}.json"


def table_path(compare_file: Path, ending: str) -> Path:
    """Return the path of the planned comparison's table, in one of its forms."""
    return FOLDER / f"{compare_file.stem}{ending}"


def name_of(compare_file: Path) -> str:
    """Return the name of a planned comparison's table: the file's path relative to here."""
    return os.path.relpath(compare_file)


def check_tables_are_of(compare_file: Path) -> None:
    """Check that no table here belongs to another compare file of the same name."""
    path, name = table_path(compare_file, ".json"), name_of(compare_file)
    if path.is_file() and (owner := read_json(path).get("file")) not in (None, name):
        raise LockstepError(
            f"{path}: belongs to {owner}, expected {name}, whose table would replace it; rename "
            "one of the two files"
        )


def planned(plan: Path) -> dict[str, dict[str, Any]]:
    """Return the trainings of a plan by their names, in order."""
    with expecting(plan, A_PLAN, KeyError):
        trainings: dict[str, dict[str, Any]] = read_sealed(plan, plan)["trainings"]
    return trainings


def result_path(name: str) -> Path:
    """Return the path of the result of a training, by its name in the plan."""
    return FOLDER / "trainings" / f"{name}.json"


def result_paths(plan: Path, of: str | None = None) -> list[Path]:
    """Return the paths of the results of a plan's trainings, or of those that one needs."""
    trainings = planned(plan)
    with expecting(plan, A_PLAN, KeyError, TypeError):
        return [*map(result_path, trainings if of is None else trainings[of]["needs"])]
