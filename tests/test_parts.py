"""A part comes off by deleting its folder: the library and the pipeline go on without it.

A copy of the tree has neither the part nor what dvc.yaml and the run files have of it. No part
imports another one, so each comes off alone: a contract in pyproject.toml.
"""

import ast
import inspect
import json
import os
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import tomlkit

from lockstep.tables.variant import Variant
from pipeline.joints import Joint
from pipeline.runfile.parts import PART_OF, TABLES, check_parts
from pipeline.runfile.tables import CoreRuntime
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.errors import check_names
from tests.offered import PARTS
from tests.test_dag import joints_of, offered_to

pytestmark = pytest.mark.long

WINGS = "lockstep", "models", "pipeline", "parts"
COPIED = (*WINGS, "benchmarks", "docs", "params", "tests", "workloads")  # tests read pages
TESTED = "lockstep", "models", "pipeline"  # rooms of tests, of library and pipeline
FILES = "dvc.yaml", "pyproject.toml", "constraints.txt", "constraints-gpu.txt", "Snakefile"
WORKER = re.compile(r"parts/\w+/python/")  # runs beside code of users, and imports itself alone
DEPS_ON_PARTS = re.compile(r"^ *- parts/(\w+)(?:/\w+\.py)?\n", re.MULTILINE)
TRACKED_TABLE = re.compile(r"^ *- (\w+)(?: *#.*)?\n", re.MULTILINE)
GENERATED = {
    "params/run.schema.json": ("-m", "pipeline", "schema"),
    "docs/reference/run-file.md": ("-m", "docs.run_file_page"),
}
# An editable install finds in the checkout what a copy lacks.
INNER = "model.LLM.optimizer"  # kinds of a part are inner ones
ALONE = """
import sys
from collections.abc import Iterator
sys.meta_path[:] = [f for f in sys.meta_path if not f.__module__.startswith("__editable__")]
"""
HELP_AND_CHECK = """
import sys
from collections.abc import Iterator
from pipeline.__main__ import app
print(*sorted(command.name or command.callback.__name__ for command in app.registered_commands))
app(["check", "--root", sys.argv[1]])
"""
CHECK_PARTS = """
import json, sys
from lockstep.errors import LockstepError
from pipeline.runfile.parts import check_parts
for document in json.loads(sys.argv[1]):
    try:
        check_parts(document, "run.toml")
    except LockstepError as error:
        print(error)
"""
IMPORT_ALL = """
import importlib, pkgutil
for wing in ("lockstep", "models", "pipeline", "parts"):
    for found in pkgutil.walk_packages([wing], f"{wing}."):
        if not found.name.endswith(".__main__"):
            importlib.import_module(found.name)
"""
each_part = pytest.mark.parametrize("part", PARTS)


@cache
def statements(file: Path) -> frozenset[tuple[str, str]]:
    """The modules of the wings that a file imports, anywhere in it, each with a name or ""."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return frozenset(pair for pair in found if pair[0].partition(".")[0] in WINGS)


def modules(file: Path) -> set[str]:
    """The modules that a file imports."""
    pairs = statements(file)
    return {module for module, _ in pairs} | {".".join(pair).rstrip(".") for pair in pairs}


@cache
def words(file: Path) -> frozenset[str]:
    """All words of a file, in which its names are."""
    return frozenset(re.findall(r"\w+", file.read_text())) if file.is_file() else frozenset()


def is_met(module: str, name: str, tree: Path) -> bool:
    """Whether a tree has a module, and a name of it: a module too, or a word of its file."""
    if not is_module(module, tree):
        return False
    file = PROJECT.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return not name or is_module(f"{module}.{name}", tree) or name in words(file)


def is_module(name: str, tree: Path) -> bool:
    place = tree.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or place.is_dir()


def missing(tree: Path) -> list[str]:
    """What the source of a tree imports of its own that it does not have."""
    return [
        f"{file.relative_to(tree)}: {module} {name}"
        for wing in WINGS
        for file in sorted((tree / wing).rglob("*.py"))
        if not WORKER.match(file.relative_to(tree).as_posix())
        for module, name in sorted(statements(PROJECT / file.relative_to(tree)))
        if not is_met(module, name, tree)
    ]


def copy_without(gone: set[str], place: Path) -> Path:
    """A copy of the tree, by hard links where the disk takes them, without some parts."""

    def link(source: str, target: str) -> None:
        try:
            Path(target).hardlink_to(source)
        except OSError:  # another disk
            shutil.copy2(source, target)

    def left_out(folder: str, inside: list[str]) -> set[str]:
        of_parts = gone if Path(folder) == PROJECT / "parts" else set()
        of_tests = gone if Path(folder) == PROJECT / "tests" / "parts" else set()
        return {name for name in inside if name == "__pycache__"} | of_parts | of_tests

    for name in COPIED:
        shutil.copytree(PROJECT / name, place / name, ignore=left_out, copy_function=link)
    for name in FILES:
        shutil.copy2(PROJECT / name, place)
    names = [name for name, part in PART_OF.items() if part in gone]
    stages = (PROJECT / "dvc.yaml").read_text()
    stages = DEPS_ON_PARTS.sub(lambda line: "" if line[1] in gone else line[0], stages)
    stages = TRACKED_TABLE.sub(lambda line: "" if line[1] in names else line[0], stages)
    (place / "dvc.yaml").write_text(stages)
    (place / "sitecustomize.py").write_text(ALONE)
    for file in (place / "params").rglob("*.toml"):
        rewrite(file, without(file.read_text(), names))
    for file, command in GENERATED.items():
        rewrite(place / file, run(place, *command))
    return place


def rewrite(file: Path, text: str) -> None:
    """Write a file of a copy anew: what is there is the checkout's own."""
    if file.read_text() != text:
        file.unlink()
        file.write_text(text)


def without(text: str, names: list[str]) -> str:
    """A run file without the tables, and the keys of tables, that have these names."""
    document = tomlkit.parse(text)
    for name in names:
        *tables, last = name.split(".")
        place = document
        for table in tables:
            place = place.get(table, {})
        for key in [key for key in place if fnmatchcase(key, last)]:
            del place[key]
    return tomlkit.dumps(document)


def run(tree: Path, *command: str) -> str:
    done = tiny.python(*command, cwd=tree, PYTHONPATH=str(tree))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@cache
def commands_of(part: str) -> frozenset[str]:
    file = PROJECT / "parts" / part / "commands.py"
    if not file.is_file():
        return frozenset()
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        for call in getattr(node, "decorator_list", []):
            if ast.unparse(call).startswith("app.command("):
                found.add(call.args[0].value if call.args else node.name)
    return frozenset(found)


def test_all_commands_of_parts_are_found():
    whole = run(PROJECT, "-c", "from pipeline.__main__ import app; print(*sorted("
                "c.name or c.callback.__name__ for c in app.registered_commands))")  # fmt: skip
    assert frozenset().union(*map(commands_of, PARTS)) <= {*whole.split()}
    assert {"push", "publish", "verify", "replay"} <= commands_of("publication")


@each_part
def test_without_a_part_every_import_is_met_and_the_command_line_lacks_its_commands(part, tmp_path):
    tree = copy_without({part}, tmp_path / "tree")
    assert missing(tree) == []
    commands, *table = run(tree, "-c", HELP_AND_CHECK, str(tmp_path)).splitlines()
    kept = frozenset().union(*map(commands_of, {*PARTS} - {part}))
    assert commands_of(part).isdisjoint(commands.split()) and kept <= {*commands.split()}
    assert any("run.toml" in line for line in table)


def test_without_any_part_every_module_is_imported_and_the_contracts_hold(tmp_path):
    tree = copy_without({*PARTS}, tmp_path / "tree")
    assert missing(tree) == []
    run(tree, "-c", IMPORT_ALL)
    run(tree, "-c", "import sys; from importlinter import cli; sys.exit(cli.lint_imports())")


@each_part
def test_a_part_says_what_it_is_and_keeps_to_its_budget(part):
    text = (PROJECT / "parts" / part / "README.md").read_text()
    budget = int(re.search(r"Budget: ([\d,]+) lines", text)[1].replace(",", ""))
    files = (PROJECT / "parts" / part).rglob("*.py")
    assert sum(len(file.read_text().splitlines()) for file in files) <= budget
    assert len(text.splitlines()) <= 12
    assert all(f"lockstep {command}" in text for command in commands_of(part))


# ---- The tables of a run file ----


def names_added() -> dict[str, str]:
    """The tables and keys that a part adds to a run file, and the part."""
    added = {}
    for part, file in zip(TABLES.parts(), TABLES, strict=True):
        own = file.RUNTIME.model_fields.keys() - CoreRuntime.model_fields.keys()
        names = [*file.TABLES, *(f"runtime.{key}" for key in own)]
        kinds = [kind for kind in vars(file).values() if is_kind_of(kind, file.__name__)]
        names += [f"{kind.where}.{'*' * (kind.where == INNER)}{kind.tag()}" for kind in kinds]
        added |= dict.fromkeys(names, part)
    return added


def is_kind_of(kind: object, module: str) -> bool:
    """Whether a name of a module is a kind of an enum that it defines."""
    return isinstance(kind, type) and issubclass(kind, Variant) and kind.__module__ == module


def test_an_error_about_a_part_that_is_not_there_knows_each_name():
    assert names_added() == PART_OF


def test_a_copy_without_a_part_names_it_where_a_run_file_has_what_it_adds(tmp_path):
    tree = copy_without({*PARTS}, tmp_path / "tree")
    documents = [nested(name, {}) for name in PART_OF]
    lines = run(tree, "-c", CHECK_PARTS, json.dumps(documents)).splitlines()
    for (name, part), line in zip(PART_OF.items(), lines, strict=True):
        check_names(line, "run.toml", name, part)
    for document in documents:
        check_parts(document, "run.toml")  # they are here


def forms(node: object) -> Iterator[dict]:
    """The forms of all enums in a schema."""
    for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "oneOf":
            yield from inner
        if isinstance(inner, dict | list):
            yield from forms(inner)


def nested(name: str, value: object) -> dict:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


@pytest.mark.parametrize("part", sorted({*PART_OF.values()}))
def test_without_a_part_no_table_of_it_is_in_the_schema_and_on_the_page(part, tmp_path):
    names = [name for name, whose in PART_OF.items() if whose == part]
    tree = copy_without({part}, tmp_path / "tree")
    schema = json.loads((tree / "params/run.schema.json").read_text())
    page = (tree / "docs/reference/run-file.md").read_text()
    tables = {"": schema["properties"], "runtime": schema["$defs"]["Runtime"]["properties"]}
    for name in names:
        table, _, key = name.rpartition(".")
        assert key not in tables.get(table, ())
        assert f"[{name}]" not in page and f"| `{key}` |" not in page
    kinds = {form.get("const") or form.get("required", [""])[0] for form in forms(schema)}
    assert kinds.isdisjoint(name.rpartition(".")[2].strip("*") for name in names if "LLM" in name)
    # or the site would not build
    headings = {re.sub(r"[^\w-]", "", text.lower()) for text in re.findall(r"^#+ (.*)", page, re.M)}
    pages = [file.read_text() for file in (tree / "docs").rglob("*.md")]
    assert {
        at for text in pages for at in re.findall(r"[(/]run-file\.md#([\w-]+)", text)
    } <= headings


# ---- Joints ----


@pytest.mark.parametrize("file", [f for f in sorted(PROJECT.glob("p*/**/*.py")) if joints_of(f)])
def test_the_file_of_each_part_has_what_its_joint_says(file):
    asking = import_module(".".join(file.relative_to(PROJECT).with_suffix("").parts))
    for name, protocol in joints_of(file).items():
        expected = getattr(asking, protocol)
        for offered in Joint(name):
            for attribute in expected.__annotations__:
                assert hasattr(offered, attribute), offered
            for method in [key for key in vars(expected) if key[0] != "_"]:
                taken = [*inspect.signature(getattr(expected, method)).parameters][1:]
                given = inspect.signature(getattr(offered, method)).parameters.values()
                needed = [p.name for p in given if p.name in taken or p.default is p.empty]
                assert needed == taken


# ---- The tests of library and pipeline ----


def files_of_library_and_pipeline() -> list[Path]:
    return [file for room in TESTED for file in sorted((PROJECT / "tests" / room).rglob("*.py"))]


def test_tests_of_library_and_pipeline_import_no_part_and_no_test_of_one():
    found = {
        file.relative_to(PROJECT).as_posix(): sorted(named)
        for file in files_of_library_and_pipeline()
        if (named := {name for name in modules(file) if re.match(r"(tests\.)?parts(\.|$)", name)})
    }
    assert not found


def ask_for(part: str) -> list[str]:
    """The tests of files of the pipeline that ask for a joint that a part offers."""
    asking = {
        ".".join(file.relative_to(PROJECT).with_suffix("").parts)
        for file in (PROJECT / "pipeline").rglob("*.py")
        if any(path.parent.name == part for path in offered_to(file))
    }
    files = [file for file in files_of_library_and_pipeline() if modules(file) & asking]
    return [str(file.relative_to(PROJECT)) for file in files if file.name.startswith("test_")]


def pytest_in(tree: Path, *tests: str) -> None:
    """Run tests in a copy, with the compiled programs of this checkout's tests."""
    (tree / ".pytest_cache").mkdir()
    (tree / ".pytest_cache" / "compiled").symlink_to(os.environ["JAX_COMPILATION_CACHE_DIR"])
    run(tree, "-m", "pytest", "-q", "-m", "not soak and not release", "-n", "2", *tests)


@pytest.mark.soak
def test_without_any_part_the_tests_of_library_and_pipeline_pass(tmp_path):
    tree = copy_without({*PARTS}, tmp_path / "tree")
    pytest_in(tree, *(f"tests/{room}" for room in TESTED))


@pytest.mark.soak
@each_part
def test_without_a_part_the_tests_of_what_asks_for_it_pass(part, tmp_path):
    """All others are those of the copy without any part: nothing else meets a part."""
    if asking := ask_for(part):
        pytest_in(copy_without({part}, tmp_path / "tree"), *asking)
