"""The documents name only what exists: files, links, keys of the run file, errors of the matrix.

`make docs` checks the links between pages; this checks what Sphinx does not see.
"""

import re
from pathlib import Path

import pytest

from pipeline import runfile
from tests.pipeline.net.test_fault_matrix import MATRIX

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "benchmarks/*.md", "docs/**/*.md")
    for path in PROJECT.glob(pattern)
    if "_build" not in path.parts
)
GENERATED = {"docs/_build/html"}
SOURCE = ("benchmarks", "docs", "models", "params", "pipeline", "profiles", "tests")
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))


@each_page
def test_paths_in_backticks_exist(page):
    named = re.findall(rf"`((?:{'|'.join(SOURCE)})/[\w./-]*)`", page.read_text())
    missing = {path for path in named if not (PROJECT / path).exists()}
    assert missing <= GENERATED


@each_page
def test_names_said_to_be_in_a_file_are_in_it(page):
    for name, path in re.findall(r"`(\w+)` in\s+`([\w./-]+\.py)`", page.read_text()):
        assert re.search(rf"\b{name}\b", (PROJECT / path).read_text()), f"{name} in {path}"


@each_page
def test_keys_of_the_run_file_exist(page):
    for table, key in re.findall(r"`\[(\w+)\] (\w+)", page.read_text()):
        tables = [runfile.Run.model_fields[table].annotation]
        if table == "config":
            tables = [runfile.CurrentConfig, runfile.OlderConfig]
        assert any(key in model.model_fields for model in tables), f"[{table}] {key}"


@pytest.mark.parametrize("page", [path for path in PAGES if "docs" not in path.parts], ids=str)
def test_links_outside_the_site_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_the_page_on_network_faults_quotes_the_errors_of_the_matrix():
    text = (PROJECT / "docs/reference/network-faults.md").read_text()
    for row in MATRIX:
        errors = row.comes.values() if isinstance(row.comes, dict) else [row.comes]
        for error in errors:
            assert error in text, f"{row.what}: {error}"
