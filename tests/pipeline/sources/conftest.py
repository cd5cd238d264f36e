"""What several files of tests of text need."""

from pathlib import Path

import pytest

from tests.pipeline.sources.corpora import stories, write_lines


@pytest.fixture
def here(tmp_path, monkeypatch) -> None:
    """So that a tokenizer's folder has a short name."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def lines(tmp_path) -> Path:
    return write_lines(tmp_path / "a.jsonl", *({"text": one} for one in stories(100)))
