"""The pages of the bridge and of workloads: their tables are whole, and their tests exist."""

import re

import pytest

from pipeline.stage.keys import PROJECT

REFERENCE = PROJECT / "docs" / "reference"


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
