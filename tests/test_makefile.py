"""`make repro` prepares what DVC needs; here with stand-ins for DVC and the summary."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stage.keys import PROJECT

PYTHON = f'#!/bin/sh\n[ "$2" = pipeline ] && exit\nexec {sys.executable} "$@"\n'
DVC = '#!/bin/sh\necho "dvc $*"\n'


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with the Makefile, whose packages seem to be installed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, tmp_path)
    for name, program in (("python", PYTHON), ("dvc", DVC)):
        file = tmp_path / ".venv" / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(program)
        file.chmod(0o755)
    (tmp_path / ".venv" / "installed").touch()
    (tmp_path / "params").mkdir()
    return tmp_path


def repro(project: Path, *arguments: str) -> None:
    command = ["make", "-s", "repro", *arguments]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "dvc repro\n", "")


def test_a_run_file_whose_path_has_a_space_is_run(project):
    run = project / "a folder" / "run.toml"
    run.parent.mkdir()
    run.write_text("# a run\n")
    repro(project, f"RUN={run}")
    assert (project / "params" / "run.toml").read_text() == "# a run\n"


@pytest.mark.parametrize(("content", "stays"), [("", False), ('{"a": {', False), ("{}", True)])
def test_what_a_killed_dvc_left_half_written_does_not_stop_the_next(project, content, stays):
    lock = project / ".dvc" / "tmp" / "rwlock"
    lock.parent.mkdir(parents=True)
    lock.write_text(content)
    repro(project)
    assert lock.exists() == stays
