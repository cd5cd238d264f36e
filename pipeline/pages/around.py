"""The results of other stages that belong to a training: its verdict, its scores, its settings."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file
from pipeline.stage import dvc_cache
from pipeline.stage.artifacts import read_made
from pipeline.stage.keys import OUT, needs

HOLDS = {  # what only the folder of that stage holds, whatever came out of it
    "download": ("shards.json",),
    "convert": ("source.json",),
    "witness": ("verdict.json",),
    "export": ("README.md", "refused.json"),
    "evaluate": ("evaluate.json",),
}
LATER = ("witness", "export", "evaluate")


class Around(NamedTuple):
    """What other stages left of a training, as far as it is still there.

    Attributes:
      tables: Tables of the run file that a stage of the run depends on, as they were written.
      verdict: verdict.json.
      evaluated: evaluate.json.
    """

    tables: dict[str, Any]
    verdict: dict | None = None
    evaluated: dict | None = None


def read(made: Path, roots: Sequence[Path], project: Path) -> Around:
    """Return what belongs to a training.

    A made file names those that its stage read, by SHA-256. Of several verdicts or evaluations of
    one training, those in the `data/` of `roots` come before those in the cache of the `project`.
    """
    try:
        trained = read_made(made)
    except LockstepError:
        return Around({})
    known = dict(trained["needs"]) | {"train": sha256_file(made)}
    tables, found = dict(trained.get("tables", {})), {}
    for stage in (*needs("train"), *LATER):
        for files in _folders(stage, roots, project):
            if mine := _mine(stage, files, known):
                known[stage], found[stage] = sha256_file(mine), files
                tables |= read_made(mine).get("tables", {})
                break
    verdict, evaluated = found.get("witness"), found.get("evaluate")
    return Around(
        tables,
        verdict and read_json(verdict["verdict.json"]),
        evaluated and read_json(evaluated["evaluate.json"]),
    )


def _folders(stage: str, roots: Sequence[Path], project: Path) -> Iterator[Mapping[str, Path]]:
    for root in roots:
        folder = root / OUT[stage]
        yield {path.relative_to(folder).as_posix(): path for path in folder.glob("*")}
    for name in HOLDS[stage]:
        yield from dvc_cache.folders(project, name)


def _mine(stage: str, files: Mapping[str, Path], known: Mapping[str, str]) -> Path | None:
    """The made file of a folder, if the stage read what this training read and left."""
    for name, path in files.items():
        if name.startswith("made-") and name.endswith(".json"):
            with suppress(LockstepError):  # damaged
                manifest = read_made(path)
                read = manifest["needs"]
                if stage in known and known[stage] != sha256_file(path):
                    continue
                if manifest["stage"] == stage and read.items() <= known.items():
                    return path
    return None
