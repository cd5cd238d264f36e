"""The DAG says the truth: a stage depends on the rooms it imports; both engines know the same."""

import ast
import contextlib
import json
import shutil
from functools import cache
from pathlib import Path

import pytest

from lockstep.files import write_json
from pipeline import runfile
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import (
    OUT,
    PINS,
    PROJECT,
    RUN_FILE,
    STAGES,
    WORKLOADS,
    Keys,
    code,
    needs,
    paths,
    pinned,
    tracked,
)
from tests import tiny
from tests.errors import check_names

# Modules found by name at run time: everything beside these files can be imported.
DYNAMIC = {
    "pipeline/sources/provider.py": "pipeline/sources/*.py",
    "models/__init__.py": "models/*.py",
    "lockstep/methods/__init__.py": "lockstep/methods/*.py",
}
ALWAYS = {"constraints.txt", "constraints-gpu.txt"}
each_stage = pytest.mark.parametrize("stage", STAGES)


@cache
def imports(file: Path) -> set[Path]:
    """The project's files that a file imports, anywhere in it, and the packages around them."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            around = file.relative_to(PROJECT).parts[: -node.level] if node.level else ()
            module = ".".join(filter(None, [*around, node.module]))  # net/ has relative imports
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    found = offered_to(file)
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            place = PROJECT.joinpath(*parts[:end])
            found |= {p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()}
    pattern = DYNAMIC.get(file.relative_to(PROJECT).as_posix())
    return found | (set(PROJECT.glob(pattern)) if pattern else set())


def offered_to(file: Path) -> set[Path]:
    """The files of parts whose joint a file asks for."""
    return {path for name in joints_of(file) for path in PROJECT.glob(f"parts/*/{name}.py")}


def joints_of(file: Path) -> dict[str, str]:
    """The joints that a file asks for, by `Joint[PROTOCOL]("NAME")`: name -> Protocol."""
    if "Joint[" not in (text := file.read_text()):
        return {}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    joints = [call for call in calls if ast.unparse(call.func).startswith("Joint[")]
    return {call.args[0].value: ast.unparse(call.func.slice) for call in joints}


def closure(file: Path) -> set[str]:
    todo, seen = [file], set()
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            todo += imports(file)
    return {path.relative_to(PROJECT).as_posix() for path in seen}


def room(path: str) -> str:
    """What dvc.yaml lists for a source file: its folder, or itself beside the stages."""
    parts = path.split("/")
    folder = 1 if parts[0] == "models" else 2  # as lockstep/optim
    return "/".join(parts[:folder])


def rooms(files: set[str]) -> set[str]:
    """The rooms of files; of a part that only adds tables to the run file, what adds them."""
    found: dict[str, set[str]] = {}
    for file in files:
        found.setdefault(room(file), set()).add(file)
    return {
        f"{name}/tables.py" if used == {f"{name}/tables.py"} else name
        for name, used in found.items()
    }


@each_stage
def test_a_stage_depends_on_exactly_the_rooms_it_imports(stage):
    declared = set(code(stage))
    imported = rooms(closure(PROJECT / "pipeline" / f"{stage}.py")) | ALWAYS
    if "parts/workload" in imported:  # whose processes run code of users
        imported |= {WORKLOADS}
    assert declared == imported, (
        f"dvc.yaml: {stage}: add {sorted(imported - declared)}, drop {sorted(declared - imported)}"
    )


@each_stage
def test_stage_command_module_and_out_go_by_one_name(stage):
    assert STAGES[stage]["cmd"] == f"python -m pipeline {stage}"
    assert (PROJECT / "pipeline" / f"{stage}.py").is_file()
    (out,) = [path for path in paths(STAGES[stage], "outs") if path.startswith("data/")]
    assert out == OUT[stage]


@each_stage
def test_dvc_leaves_what_snakemake_made_unless_it_was_read_outside(stage):
    """DVC deletes an out before it runs the stage, unless the out persists."""
    out = STAGES[stage]["outs"][0]
    assert out == ({OUT[stage]: {"persist": True}} if needs(stage) else OUT[stage])


@each_stage
def test_tracked_tables_are_in_every_ready_run(stage):
    for run in tiny.READY_RUNS:
        keys = Keys(run)
        for table in tracked(stage):
            keys.table(table)
        assert keys.pins(stage).keys() <= {*pinned(stage)}


def test_the_tracked_tables_are_all_of_the_run_but_runtime():
    covered = {table for stage in STAGES for table in tracked(stage)}
    covered |= {f"{PINS}{key}" for stage in STAGES for key in pinned(stage)}
    document = Keys(PROJECT / RUN_FILE)._tables

    def leaves(table: dict, prefix: str) -> set[str]:
        return {
            leaf
            for name, value in table.items()
            for leaf in (
                leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
            )
        }

    for leaf in leaves(document, ""):
        if not leaf.startswith("runtime."):
            assert any(leaf == table or leaf.startswith(f"{table}.") for table in covered), leaf


IMPORTS_NO = {  # what may be known before the other is imported, which takes seconds
    "pipeline.stage.keys": ("jax", "numpy", "pydantic", "typer"),
    "lockstep.protocol.coordinator": ("jax", "numpy", "pydantic", "typer"),
    "pipeline.runfile": ("jax", "numpy", "optax"),
    "pipeline.audit.unchecked_bundle": ("jax",),
    "parts.carrier.sidecar": ("jax",),
    "parts.publication.readers_checks": ("jax",),
}


@pytest.mark.parametrize("module", IMPORTS_NO)
def test_what_must_be_there_at_once_imports_nothing_heavy(module):
    program = f"import sys, {module}; print([m for m in {IMPORTS_NO[module]} if m in sys.modules])"
    assert tiny.python("-c", program).stdout == "[]\n"


def test_snakemake_has_the_stages_and_edges_of_dvc_yaml():
    done = tiny.python("-m", "snakemake", "--d3dag", "--forceall", "--cores", "1")
    assert done.returncode == 0, done.stderr
    graph = json.loads(done.stdout[done.stdout.index("{") :])
    label = {node["id"]: node["value"]["label"] for node in graph["nodes"]}
    found = {(label[edge["u"]], label[edge["v"]]) for edge in graph["edges"]}
    edges = {(need, stage) for stage in STAGES for need in needs(stage)}
    assert found == edges | {(stage, "all") for stage in STAGES}


@pytest.mark.parametrize(
    ("name", "find", "replace", "line"),
    [
        # where Psyche's own configurations come to: they have [config] and [model] alone
        (RUN_FILE, "[links]", "[links_]", ": links is missing; `lockstep import "),
        ("params/compare.toml", "\n[", "\n[[", ":"),
    ],
)
def test_snakemake_says_in_one_line_what_is_wrong_with_a_file(alone, name, find, replace, line):
    (alone / name).write_text((PROJECT / name).read_text().replace(find, replace, 1))
    assert refusal_of_snakemake(alone).startswith(f"error: {name}{line}")


def test_snakemake_refuses_a_result_of_what_is_not_pinned(alone):
    """Its name has no pin in it, so Snakemake would take it."""
    with contextlib.chdir(alone), Paths("download", Path(RUN_FILE), Path()).building() as folder:
        write_json(folder / "shards.json", {"source": {"sha256": "ab" * 32}})
    pin = runfile.load(alone / RUN_FILE).pins.data
    check_names(refusal_of_snakemake(alone), "data/shards", "ab" * 32, "[pins] data", pin)


@pytest.fixture
def alone(tmp_path) -> Path:
    """A folder that has the Snakefile and the default run."""
    for link in ("Snakefile", "profiles"):
        (tmp_path / link).symlink_to(PROJECT / link)
    (tmp_path / "params").mkdir()
    shutil.copy(PROJECT / RUN_FILE, tmp_path / RUN_FILE)
    return tmp_path


def refusal_of_snakemake(folder: Path) -> str:
    """Return the one line in which Snakemake refuses to plan the default run in a folder."""
    done = tiny.python("-m", "snakemake", "-n", cwd=folder)
    said = [line for line in done.stderr.splitlines() if "profile" not in line]
    assert (done.returncode, len(said)) == (1, 1), done.stderr
    return said[0]
