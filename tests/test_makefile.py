"""`make repro` prepares what DVC needs; here with stand-ins for DVC and the summary."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stage.keys import PROJECT

# Of Python it has what reads a file, and never pip: this one would install into the tests' own.
PYTHON = f"""#!/bin/sh
case "$2" in
json.tool) exec {sys.executable} "$@" ;;
pipeline) ;;
*) echo "unexpected: python $*"; exit 1 ;;
esac
"""
DVC = '#!/bin/sh\necho "dvc $*"\n'


@pytest.fixture
def project(tmp_path) -> Path:
    """A folder with the Makefile, whose packages are newer than what lists them."""
    for name, program in (("python", PYTHON), ("dvc", DVC)):
        file = tmp_path / ".venv" / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(program)
        file.chmod(0o755)
    listed = ("pyproject.toml", "constraints.txt", "constraints-gpu.txt")
    for age, name in enumerate((".venv/installed", ".venv/constraints.txt", *listed)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    shutil.copy(PROJECT / "Makefile", tmp_path)
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


@pytest.mark.parametrize(
    ("gpu", "folder", "extras"),
    [
        ("", ".venv", "engines"),
        ("1", ".venv-gpu", "engines,cuda13"),
        ("cuda13", ".venv-gpu", "engines,cuda13"),
        ("cuda12", ".venv-cuda12", "engines,cuda12"),
    ],
)
def test_each_cuda_has_its_packages_in_an_environment_of_its_own(project, gpu, folder, extras):
    shutil.rmtree(project / ".venv")
    command = ["make", "-n", "repro", f"GPU={gpu}"]
    said = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True).stdout
    assert f"venv {folder}\n" in said and f"-e '.[{extras}]'" in said
    assert ("constraints-gpu.txt constraints.txt >" in said) == bool(gpu)
    assert (PROJECT / ".gitignore").read_text().count(f"/{folder}/\n") == 1


def test_a_cuda_that_there_is_not_is_one_line(project):
    done = subprocess.run(["make", "GPU=cuda11"], cwd=project, capture_output=True, text=True)
    assert done.returncode and "GPU=cuda11: expected 1, cuda12 or cuda13." in done.stderr
