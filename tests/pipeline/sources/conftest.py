"""What several files of tests of text need."""

from pathlib import Path

import pytest

from tests.pipeline.sources.corpora import lines_of, put, stories


@pytest.fixture
def here(tmp_path, monkeypatch) -> None:
    """So that a tokenizer's folder has a short name."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def lines(tmp_path) -> Path:
    return put(tmp_path, {"a.jsonl": lines_of(stories(100))}) / "a.jsonl"


@pytest.fixture
def root(tmp_path) -> Path:
    """An empty folder for a user's data."""
    (folder := tmp_path / "tokens").mkdir()
    return folder
