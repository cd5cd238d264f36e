"""What keeps the house in order: sizes, names, and a list of dependencies that tells the truth."""

import ast
import os
import re
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import grimp
import pytest

from models import MODELS
from pipeline.stage.keys import PROJECT, STAGES

OF_USERS = (*PROJECT.glob("parts/*/python"), PROJECT / "lockstep" / "python")
MOST_FILES, MOST_LINES, MOST_LINES_OF_A_FUNCTION = 14, 600, 60
MOST_LINES_OF_A_ROOM = 2600
# Docstrings that begin like this have lost the noun that they are about.
NOUNLESS = re.compile(r"As of|Of (the|its|a|an)\b")
PARTS_OF_A_MODEL = {"Attention", "Config", "Model"}  # each family of models/ has its own
# Most lines of these are their arguments, or options.
WITH_LONG_SIGNATURE = {"lockstep/simulation/simulate.py:simulate", "parts/new/commands.py:new"}
PYPROJECT = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
ROOMS = ("lockstep", "parts", "pipeline", "models")
SOURCE = sorted(path for room in ROOMS for path in (PROJECT / room).rglob("*.py"))
# Where a distribution goes by another name than the module.
DISTRIBUTION = {
    "cyclonedx": "cyclonedx-python-lib",
    "google.auth": "google-auth",
    "google_crc32c": "google-crc32c",
    "orbax": "orbax-checkpoint",
    "yaml": "pyyaml",
    "zmq": "pyzmq",
}
COMMANDS = {"dvc", "snakemake"}  # run, not imported
# By s3fs, lm_eval, jax, cyclonedx-python-lib and pydantic.
BROUGHT = {"aiobotocore", "datasets", "jaxlib", "packageurl", "pydantic-core"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=!~;\s]", requirement)[0]) for requirement in requirements}


def imported() -> set[str]:
    """The distributions that the source imports."""
    modules = set()
    for path in SOURCE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules.add(node.module)
    ours = {"benchmarks", "lockstep", "lockstep_torch", "models", "parts", "pipeline"}
    names = set()
    for module in modules:
        top, two = module.split(".")[0], ".".join(module.split(".")[:2])
        if top not in sys.stdlib_module_names and top not in ours:
            names.add(normal(DISTRIBUTION.get(two, DISTRIBUTION.get(top, top))))
    return names


def test_the_listed_dependencies_are_what_the_source_imports():
    extras = PYPROJECT["optional-dependencies"]
    core = declared(PYPROJECT["dependencies"])
    optional = {
        name for extra in extras.keys() - {"test", "docs"} for name in declared(extras[extra])
    }
    needed = imported()
    assert needed - core - optional <= BROUGHT
    assert core <= needed
    assert declared(extras["engines"]) == COMMANDS | declared(extras["parquet"])


@pytest.mark.parametrize("section", ["dependencies", "docs", "engines", "test"])
def test_each_dependency_has_its_reason_in_a_comment(section):
    text = (PROJECT / "pyproject.toml").read_text()
    block = text.split(f"\n{section} = [\n")[1].split("\n]")[0]
    for line in block.splitlines():
        assert re.fullmatch(r'    "[^"]+",  # .+', line), line


def test_every_dependency_is_pinned():
    pins = declared(
        [
            line
            for line in (PROJECT / "constraints.txt").read_text().splitlines()
            if not line.startswith("#")
        ]
    )
    extras = PYPROJECT["optional-dependencies"]
    listed = [*PYPROJECT["dependencies"], *(name for extra in extras.values() for name in extra)]
    assert declared([requirement for requirement in listed if "==" not in requirement]) <= pins


def test_a_gpu_has_other_versions_of_what_depends_on_it_alone():
    # docs/reference/commands.md: `make repro GPU=1` puts these lines in the place of the others
    plain, gpu = (
        dict(re.findall(r"^([\w.-]+)==(\S+)$", (PROJECT / name).read_text(), re.M))
        for name in ("constraints.txt", "constraints-gpu.txt")
    )
    assert plain.keys() & gpu.keys() == {"flax", "jax", "jaxlib"}
    of_gpu = {name for name in gpu if name.startswith(("nvidia-", "jax-cuda"))}
    assert gpu.keys() - of_gpu == {"flax", "jax", "jaxlib"}
    assert {gpu[name] for name in gpu if name.startswith("jax")} == {gpu["jax"]}


def test_no_file_is_longer_than_a_reader_holds_in_mind():
    long = {
        path.relative_to(PROJECT).as_posix(): lines
        for path in SOURCE
        if (lines := len(path.read_text().splitlines())) > MOST_LINES
    }
    assert not long


def test_no_room_has_more_files_than_a_reader_takes_in():
    """Beside a file for each stage in pipeline/, family in models/, and method in methods/."""
    listed = {PROJECT / "pipeline" / f"{stage}.py" for stage in STAGES}
    listed |= {PROJECT / "models" / f"{family}.py" for family in MODELS}
    methods = PROJECT / "lockstep" / "methods"  # a new method is a file there (extend.md)
    listed |= {path for path in methods.glob("*.py") if "\nCARDS = (" in path.read_text()}
    rooms = Counter(path.parent for path in {*SOURCE} - listed if path.name != "__init__.py")
    full = {str(room.relative_to(PROJECT)): n for room, n in rooms.items() if n > MOST_FILES}
    assert not full


def test_no_room_is_longer_than_a_reader_takes_in():
    rooms = Counter()
    for path in SOURCE:
        rooms[path.parent.relative_to(PROJECT).as_posix()] += len(path.read_text().splitlines())
    assert not {room: lines for room, lines in rooms.items() if lines > MOST_LINES_OF_A_ROOM}


@pytest.mark.parametrize(
    "page", [*(f"{wing}/__init__.py" for wing in ROOMS), "tests/README.md"], ids=os.path.dirname
)
def test_a_wing_keeps_to_its_budget(page):
    """Who needs more lines takes them from what is there, or says why the budget moves."""
    said = re.search(r"Budget: ([\d,]+) lines", (PROJECT / page).read_text())
    files = (PROJECT / page).parent.rglob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= int(
        said[1].replace(",", "")
    )


def test_no_file_imports_itself_by_way_of_others():
    """Also inside rooms, where the layers of pyproject.toml do not look, and inside functions."""
    graph = grimp.build_graph(*ROOMS, exclude_type_checking_imports=True, cache_dir=None)
    edges = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while leaves := {name for name, to in edges.items() if not to & edges.keys()}:
        edges = {name: to for name, to in edges.items() if name not in leaves}
    assert not edges, "these files import each other, or what does"


def test_no_room_of_a_part_imports_itself_by_way_of_others():
    """A room is a folder of a part, or a file at its top."""
    graph = grimp.build_graph("parts", cache_dir=None)
    rooms = {name: ".".join(name.split(".")[:3]) for name in graph.modules if name.count(".") > 1}
    edges = {room: set[str]() for room in rooms.values()}
    for name, room in rooms.items():
        to = {rooms[one] for one in graph.find_modules_directly_imported_by(name) if one in rooms}
        edges[room] |= to - {room}
    while leaves := {room for room, to in edges.items() if not to & edges.keys()}:
        edges = {room: to for room, to in edges.items() if room not in leaves}
    assert not edges, "these rooms import each other, or what does"


def test_a_docstring_says_what_it_is_about():
    nameless = [
        f"{path.relative_to(PROJECT).as_posix()}: {text.splitlines()[0]}"
        for path in SOURCE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
        and NOUNLESS.match(text)
    ]
    assert not nameless


def test_no_function_is_longer_than_a_page():
    long = {
        f"{path.relative_to(PROJECT).as_posix()}:{node.name}": lines
        for path in SOURCE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := lines_of_code(node)) > MOST_LINES_OF_A_FUNCTION
    }
    assert long.keys() <= WITH_LONG_SIGNATURE, long


def lines_of_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, from `def` on, without its docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - (docstring.end_lineno - docstring.lineno + 1)


def test_no_name_of_a_class_or_a_type_stands_for_two_things():
    places = defaultdict(set)
    for path in SOURCE:
        for name in names_of_types(ast.parse(path.read_text())):
            if any(
                map(path.is_relative_to, OF_USERS)
            ):  # it runs beside code of users, without ours
                continue
            if not (path.is_relative_to(PROJECT / "models") and name in PARTS_OF_A_MODEL):
                places[name].add(path.relative_to(PROJECT).as_posix())
    assert {name: sorted(files) for name, files in places.items() if len(files) > 1} == {}


def names_of_types(module: ast.Module) -> set[str]:
    """The classes of a module, and what it assigns to a name in CapWords: aliases, type variables.

    A private class counts too: its name is in tracebacks, and a reader searches for it.
    """
    names = {node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
    below_if = [
        node for branch in module.body if isinstance(branch, ast.If) for node in branch.body
    ]
    for node in [*module.body, *below_if]:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = (part for target in targets for part in ast.walk(target))
            names |= {
                part.id
                for part in named
                if isinstance(part, ast.Name) and re.fullmatch(r"[A-Z]\w*[a-z]\w*", part.id)
            }
    return names


def test_the_folders_of_pipeline_are_rooms_of_dvc_yaml():
    """A folder that no stage depends on would change results without a key knowing."""
    rooms = {path.parent.name for path in (PROJECT / "pipeline").glob("*/__init__.py")}
    listed = {
        Path(dep).name
        for stage in STAGES.values()
        for dep in stage["deps"]
        if dep.startswith("pipeline/")
    }
    no_stages = {"recheck", "preflight"}
    assert rooms - no_stages <= listed
