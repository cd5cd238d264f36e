"""The pages of the bridge and of workloads: their tables are whole, and their tests exist."""

import re

import pytest

from pipeline.stage.keys import PROJECT
from tests.parts.workload import methods_page

REFERENCE = PROJECT / "docs" / "reference"


def test_the_bridge_has_a_row_for_each_feature_in_order():
    rows = re.findall(r"^\| F(\d+) \|", (REFERENCE / "bridge.md").read_text(), re.MULTILINE)
    assert rows == [str(number) for number in range(1, 53)]


def test_the_json_of_the_bridges_methods_is_what_our_worker_answers(monkeypatch):
    for part in ("parts/workload", "lockstep"):
        monkeypatch.syspath_prepend(PROJECT / part / "python")
    stale = methods_page.PAGE.read_text() != methods_page.page()
    assert not stale, "run `python -m tests.parts.workload.methods_page`"


@pytest.mark.parametrize("page", ["bridge.md", "workloads.md"])
def test_each_test_that_a_page_names_exists(page):
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", (REFERENCE / page).read_text()))
    assert len(named) > 10
    for file, name in named:
        (path,) = (PROJECT / "tests").rglob(file)
        assert re.search(rf"^def {name}\(", path.read_text(), re.MULTILINE), f"{file}::{name}"


@pytest.mark.parametrize("page", ["bridge.md", "workloads.md"])
def test_each_row_has_a_test_or_says_no(page):
    text = (REFERENCE / page).read_text()
    for row in re.findall(r"^\| (?:F\d+|`lockstep .*?`.*?|stage .*?) \|.*$", text, re.MULTILINE):
        assert "::test_" in row or re.search(r"\| no: ", row), row
