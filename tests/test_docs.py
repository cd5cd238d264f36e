"""The documents name only what exists: files, links, keys of the run file, errors of the matrix.

`make docs` checks the links between pages; this checks what Sphinx does not see.
"""

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

import lockstep
from lockstep.tables.faults import KINDS
from pipeline import runfile
from pipeline.__main__ import app
from pipeline.stage.keys import STAGES
from tests.offered import offered
from tests.pipeline.net.faults.matrix import MATRIX

PROJECT = Path(__file__).resolve().parents[1]
OUTSIDE_THE_SITE = [*PROJECT.glob("*.md"), *PROJECT.glob("benchmarks/*.md")]
PAGES = [*OUTSIDE_THE_SITE, *PROJECT.glob("docs/**/*.md")]
GENERATED = {"docs/_build/html"}
SOURCE = ("benchmarks", "docs", "examples", "params", "profiles", "tests")
SOURCE += ("lockstep", "models", "parts", "pipeline")


def each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=[str(p.relative_to(PROJECT)) for p in pages])


each_page = each(PAGES)


@each_page
def test_paths_in_backticks_exist(page):
    paths = re.findall(rf"`((?:{'|'.join(SOURCE)})/[\w./-]*)`", page.read_text())
    missing = {path for path in paths if not (PROJECT / path).exists()}
    assert missing <= GENERATED


@each_page
def test_names_that_a_page_places_in_a_file_are_in_it(page):
    for name, path in re.findall(r"`(\w+)`\s+(?:in|of)\s+`([\w./-]+\.py)`", page.read_text()):
        assert re.search(rf"\b{name}\b", (PROJECT / path).read_text()), f"{name} in {path}"


@each_page
def test_tests_named_by_a_page_exist(page):
    for name in re.findall(r"`(test_\w+)`", page.read_text()):
        files = (PROJECT / "tests").rglob("test_*.py")
        assert any(f"def {name}(" in file.read_text() for file in files), name


@each_page
def test_every_row_of_a_table_has_as_many_cells_as_its_header(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        header, *rows = table.splitlines()
        for row in rows:
            assert cells(row) == cells(header), row


def cells(row: str) -> int:
    """Cells of a table's row; a bar is one in code too, unless a backslash stands before it."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def test_every_stage_has_the_function_that_the_page_on_extending_shows():
    page = (PROJECT / "docs/how-to/extend.md").read_text()
    documented = {*re.findall(r"`(run\([\w, ]+\))`", page)}
    defined = set()
    for stage in STAGES:
        tree = ast.parse((PROJECT / f"pipeline/{stage}.py").read_text())
        (run,) = [node for node in tree.body if getattr(node, "name", None) == "run"]
        defined.add(f"run({', '.join(argument.arg for argument in run.args.args)})")
    assert documented == defined


@each_page
def test_keys_of_the_run_file_exist(page):
    for table, key in re.findall(r"`\[(\w+)\] (\w+)", page.read_text()):
        tables = [runfile.Run.model_fields[table].annotation]
        if table == "config":
            tables = [runfile.CurrentConfig, runfile.OlderConfig]
        assert any(key in model.model_fields for model in tables), f"[{table}] {key}"


def test_kinds_of_lies_that_pages_count_are_those_of_the_table_that_was_measured():
    table = (PROJECT / "docs/reference/detection.md").read_text()
    table = table.split("\n| kind |")[1].split("\n\n")[0]
    rows = [kind for kind in re.findall(r"^\| `(\w+)` \|", table, re.M) if kind in KINDS]
    for page in ("README.md", "docs/explanation/verification.md"):
        counts = re.findall(r"(\d+)\s+kinds\s+of\s+\w+", (PROJECT / page).read_text())
        assert counts == [str(len(rows))], page


@each_page
def test_examples_of_toml_are_of_the_tables_of_a_run_file_or_of_a_file_of_a_part(page):
    for example in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        known = [runfile.Run.model_fields.keys(), *(part.TABLES for part in offered("toml_file"))]
        assert any(tomllib.loads(example).keys() <= keys for keys in known), example


@each_page
def test_commands_exist(page):
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {group.name for group in app.registered_groups}
    targets = re.findall(r"^([a-z-]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    for program, name in re.findall(
        r"(?:^|`)(lockstep|make) ([a-z][a-z-]*)", page.read_text(), re.M
    ):
        assert name in (commands if program == "lockstep" else targets), f"{program} {name}"


@each_page
def test_options_of_a_command_in_a_row_or_an_example_exist(page):
    program = typer.main.get_command(app)
    for line in re.findall(r"^(?:\| `)?lockstep .*", page.read_text().replace("\\\n", ""), re.M):
        commands = [program.commands[name] for name in re.findall(r"lockstep ([a-z][\w-]*)", line)]
        if any("ignore_unknown_options" in command.context_settings for command in commands):
            continue  # they are Psyche's
        known = {*options(program, within=False)}.union(*map(options, commands))
        assert {*re.findall(r"(?<![\w-])--[a-z][\w-]*", line.split(" # ")[0])} <= known, line


def options(command: typer.main.TyperCommand, within: bool = True) -> set[str]:
    """Return the options of a command, and of the commands within it."""
    inner = getattr(command, "commands", {}).values() if within else ()
    own = (parameter.opts + parameter.secondary_opts for parameter in command.params)
    return {"--help"}.union(*own, *map(options, inner))


def test_the_api_page_has_what_import_lockstep_has():
    page = (PROJECT / "docs/reference/api.md").read_text()
    listed = re.findall(r"^   ~(lockstep[\w.]*)\.(\w+)$", page, re.M)
    assert sorted(listed) == sorted((module, name) for name, module in lockstep._MODULES.items())
    assert {*lockstep.__all__} - {*lockstep._MODULES} == {"__version__", "models"}
    assert "`lockstep.models`" in page and "`lockstep.__version__`" in page


def test_pre_commit_runs_what_make_lint_runs():
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (PROJECT / "Makefile").read_text(), re.M)[1]
    (repo,) = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert entries == [f".venv/bin/{line.strip()}" for line in lint.splitlines()]


@each_page
def test_no_page_commits_whatever_lies_in_the_checkout(page):
    everything = r"git (?:add (?:-A|--all|-u|\.(?!\w)|\*)|commit (?:-a|--all))"
    assert not re.search(everything, page.read_text())


@each(OUTSIDE_THE_SITE)
def test_links_outside_the_site_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


@each_page
def test_links_lead_to_pages_that_github_shows_too(page):
    for link in re.findall(r"\]\(([^)#\s:]+\.md)[)#]", page.read_text()):
        assert "```{include}" not in (page.parent / link).read_text(), link


def messages() -> Iterator[str]:
    """Yield each text in the source; what an f-string inserts is a line break."""
    for folder in ("lockstep", "models", "parts", "pipeline", "workloads"):
        for file in (PROJECT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
                elif isinstance(node, ast.JoinedStr):
                    texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                    yield "\n".join(map(str, texts))
    yield (PROJECT / "Makefile").read_text()
    yield from map(os.strerror, range(134))


def test_errors_quoted_by_the_page_on_troubleshooting_are_of_words_in_the_source():
    page = (PROJECT / "docs/how-to/troubleshoot.md").read_text()
    ours, _ = page.split("## Setting up")  # the tools' own errors follow
    source = "\n".join(messages())
    stale = []
    for row in re.findall(r"^\|(.*?[^\\])\|", ours, re.M):
        for quote in re.findall(r"`([^`]+)`", row):
            pairs = re.findall(r"(?=\b([a-z]+ [a-z]+)\b)", quote.replace("expected", ":"))
            if len(pairs) > 1 and sum(pair in source for pair in pairs) < len(pairs) / 2:
                stale.append(quote)
    assert stale == []


def test_the_page_on_architecture_is_short_and_names_what_exists():
    page = (PROJECT / "docs/explanation/architecture.md").read_text()
    assert len(page.splitlines()) <= 125
    placed = 0
    for line in re.findall(r"^\|.*\|$|^- .*(?:\n  .*)*|`[^`]+` in\s+`[^`]+`", page, re.M):
        files = [path for path in re.findall(r"`([\w/.]+\.py)`", line)]
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", line) if len(files) == 1 else []:
            assert name in defined(PROJECT / files[0]), f"{name} in {files[0]}"
            placed += 1
    assert placed >= 30


def defined(file: Path) -> set[str]:
    """Return the functions and classes of a file, and the methods as Class.method."""
    body = ast.parse(file.read_text()).body
    nodes = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    methods = {
        f"{node.name}.{one.name}"
        for node in nodes
        for one in node.body
        if isinstance(node, ast.ClassDef) and isinstance(one, ast.FunctionDef)
    }
    return methods | {node.name for node in nodes}


def test_readme_is_short_and_its_example_runs(capsys):
    text = (PROJECT / "README.md").read_text()
    assert len(text.split()) <= 1500
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict = {}
    exec(example, names)
    first, *_, last = names["result"].train["loss"]
    assert last < first
    assert str(names["result"].bytes_per_peer) in capsys.readouterr().out


def test_the_page_on_network_faults_quotes_the_errors_of_the_matrix():
    text = (PROJECT / "docs/reference/network-faults.md").read_text()
    for row in MATRIX:
        errors = row.comes.values() if isinstance(row.comes, dict) else [row.comes]
        for error in errors:
            assert error in text, f"{row.what}: {error}"
