"""The key of a stage: what its result depends on, in twelve hexadecimal digits.

    key = SHA-256(the stage's own tables of the run file,
                  the content of its code and of the constraints file,
                  the keys of the stages it needs)

A finished stage leaves `made-<key>.json` in its output folder, and both engines ask whether the
file of the current key is there. Only dvc.yaml lists those tables, code and stages. Nothing heavy
is imported, because every Snakemake job reads this file.
"""

import ast
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import yaml

from lockstep.errors import LockstepError
from pipeline.toml_file import read_run_file, value_at

PROJECT = Path(__file__).resolve().parents[2]
STAGES = yaml.safe_load((PROJECT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
MADE_BY_WORKLOAD = "download"  # only where the data are the workload's own
WORKLOADS = "workloads"  # models of users: of no account to a run without one
RUN_FILE = "params/run.toml"  # the name in dvc.yaml; `--run FILE` reads another file instead
PINS = "pins."


def paths(stage: dict, *kinds: str) -> list[str]:
    """Return the paths that a stage lists under `kinds`, without options such as `cache: false`."""
    entries = [entry for kind in kinds for entry in stage.get(kind, [])]
    return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


OUT = {name: paths(stage, "outs")[0] for name, stage in STAGES.items()}
MAKER = {out: name for name, out in OUT.items()}


def needs(name: str) -> list[str]:
    """Return the stages whose outputs the stage's key depends on, in the order of dvc.yaml."""
    return [MAKER[dep] for dep in paths(STAGES[name], "deps") if dep in MAKER]


def upstream(name: str) -> set[str]:
    """Return a stage and all that it needs."""
    return {name}.union(*map(upstream, needs(name)))


def code(name: str) -> list[str]:
    """Return the source that the stage's key depends on: files and folders of the checkout."""
    return [dep for dep in paths(STAGES[name], "deps") if dep not in MAKER]


def tracked(name: str) -> list[str]:
    """Return the run file's tables and values that the stage's key depends on, by dotted names.

    Pins are not among them. A pin may refuse a result, but never changes one, so a finished run can
    be pinned without running again.
    """
    return [table for table in _listed(name) if not table.startswith(PINS)]


def pinned(name: str) -> list[str]:
    """Return the keys of `[pins]` that hold for what the stage reads outside."""
    return [table.removeprefix(PINS) for table in _listed(name) if table.startswith(PINS)]


def _listed(name: str) -> list[str]:
    return [table for entry in STAGES[name].get("params", []) for table in entry[RUN_FILE]]


class Keys:
    """The keys of all stages for one run file, which must have every table that dvc.yaml tracks."""

    def __init__(self, run: Path):
        self.run = Path(run)
        self._contents: dict[str, dict[str, str]] = {}
        self._sources: dict[str, str] = {}

    def again(self) -> "Keys":
        """Return the keys of the run file as it is now, with the source as it was read first."""
        now = Keys(self.run)
        now._sources = self._sources
        return now

    @cached_property
    def _tables(self) -> dict:
        return read_run_file(self.run)

    def table(self, name: str) -> object:
        """Return the value of a dotted name in the run file, for a key."""
        try:
            return value_at(self._tables, name)
        except (KeyError, TypeError) as error:
            raise LockstepError(
                f"{self.run}: {name} is missing; `lockstep import {self.run}` writes a run file "
                "with every table"
            ) from error

    def pins(self, name: str) -> dict[str, str]:
        """Return the pins of what stage `name` reads outside, those that are set."""
        pins = {key: str(self.table(f"{PINS}{key}")) for key in pinned(name)}
        return {key: pin for key, pin in pins.items() if pin}

    def tables(self, name: str) -> dict[str, object]:
        """Return the parts of the run file that stage `name`'s key depends on, as written."""
        return {table: self.table(table) for table in tracked(name)}

    def key(self, name: str) -> str:
        """Return the key of stage `name`, 12 hexadecimal digits.

        Its inputs are read once, so later edits do not count, just as they do not affect a process
        that is already running the stage.
        """
        return digest(self.content(name))[:12]

    def content(self, name: str) -> dict[str, str]:
        """Return what the key of stage `name` digests: a hash of each table, room and stage."""
        if name not in self._contents:
            self._contents[name] = self._content(name)
        return self._contents[name]

    def _content(self, name: str) -> dict[str, str]:
        runs_workload = self._runs_workload(name)
        tables = {
            f"[{table}]": digest(value)
            for table, value in self.tables(name).items()
            if table != "workload" or runs_workload or name != MADE_BY_WORKLOAD
        }
        used = [path for path in code(name) if path != WORKLOADS or runs_workload]
        rooms = {path: self._source(path) for path in used if path != WORKLOADS}
        if WORKLOADS in used:
            factory = self.table("workload")["factory"]
            rooms[WORKLOADS] = digest_of_files(files_of_factory(factory, PROJECT / WORKLOADS))
        return tables | rooms | {f"stage {need}": self.key(need) for need in needs(name)}

    def _source(self, path: str) -> str:
        if path not in self._sources:
            self._sources[path] = digest_of_source(PROJECT / path)
        return self._sources[path]

    def _runs_workload(self, name: str) -> bool:
        """Return whether stage `name` runs a user's code, on which its key depends then."""
        if name == MADE_BY_WORKLOAD:
            location = self.table("model.LLM.data_location")
            if "Workload" not in (location if isinstance(location, dict) else {location}):
                return False
        table = self._tables.get("workload")  # none where its part is not here
        factory = table.get("factory") if isinstance(table, dict) else None
        return isinstance(factory, str) and factory != ""  # the loader refuses anything else

    def made(self, name: str) -> str:
        """Return the file whose presence means that stage `name` is done."""
        return f"{OUT[name]}/made-{self.key(name)}.json"


def digest(value: object) -> str:
    """Return the SHA-256 of a value as JSON, for a key."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_of_source(path: Path) -> str:
    """Return the SHA-256 of a file, or a folder without caches, for a stage's key."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    files = [file for file in files if "__pycache__" not in file.parts]
    if not files:
        raise LockstepError(f"dvc.yaml: {path.relative_to(PROJECT)} is missing, expected source")
    return digest_of_files({file.relative_to(path.parent).as_posix(): file for file in files})


def digest_of_files(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of names and the contents of their files, in order, for a key."""
    digest = hashlib.sha256()
    for name, file in files.items():
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def files_of_factory(factory: str, folder: Path) -> dict[str, Path]:
    """Return the files in a folder that make up a factory, module:name, by their names there.

    These are the file of its module, the files in the folder that it imports by import statements,
    and so on. A package counts with all its files.
    """
    result: dict[str, Path] = {}
    todo, seen = [factory.partition(":")[0].partition(".")[0]], set[str]()
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        package, file = folder / name, folder / f"{name}.py"
        if file.is_file() and not (package / "__init__.py").is_file():
            files = [file]
        else:
            files = [path for path in package.rglob("*") if path.is_file()]
        for path in files:
            if "__pycache__" not in path.parts:
                result[path.relative_to(folder).as_posix()] = path
                todo += _imported(path) if path.suffix == ".py" else ()
    return dict(sorted(result.items()))


def lacks_of_factory(factory: str, folder: Path) -> str:
    """Return what a stranger's factory has to be; "" if a file in the folder defines it.

    Whatever such a file imports can have its name too, and could be anything.
    """
    module, _, name = factory.partition(":")
    path = folder / module.replace(".", "/")
    files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    nodes = (node for file in files for node in _tree(file).body)
    is_defined = name in (getattr(node, "name", None) for node in nodes)
    return "" if is_defined else f"what a file of {WORKLOADS}/ defines"


def _imported(path: Path) -> set[str]:
    """Return the top names of the modules that a factory's file imports anywhere in it."""
    names = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the error shows when it runs
        return ast.Module([], [])
