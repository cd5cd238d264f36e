"""The rows of `lockstep check` for a tiny run with changes."""

import sys
from pathlib import Path

import pytest

from pipeline import runfile
from pipeline.preflight.preflight import Preflight
from pipeline.preflight.row import CheckRow, Mark
from tests import tiny


def written(root: Path, **changes: object) -> Path:
    """Write a tiny run with changes, and return its file."""
    return tiny.start(root, **changes)[0]


def looks(run_file: Path, root: Path) -> list[CheckRow]:
    return [*Preflight(runfile.load(run_file), run_file, root).rows()]


def said(rows: list[CheckRow], mark: Mark) -> dict[str, str]:
    """What the rows with a mark say, by their names."""
    return {row.name: row.text for row in rows if row.mark is mark}


def check_lacking(
    patch: pytest.MonkeyPatch, root: Path, key: str, module: str, **changes: object
) -> None:
    """Check that a run fails for want of a module, and that the row names the key of it."""
    patch.setitem(sys.modules, module, None)
    patch.setitem(sys.modules, module.partition(".")[0], None)
    failing = said(looks(written(root, **changes), root), Mark.FAILS)
    assert key in failing["packages"] and f"{module} is not installed" in failing["packages"]
    assert "pip install" in failing["packages"]
