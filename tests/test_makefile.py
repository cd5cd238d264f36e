"""`make repro` prepares what DVC needs; here with stand-ins for DVC and the summary."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stage.keys import PROJECT
from tests import tiny

# Of Python it has what reads a file, and never pip: this one would install into the tests' own.
PYTHON = f"""#!/bin/sh
case "$2" in
json.tool) exec {sys.executable} "$@" ;;
pipeline) case "$3" in whole) cat "$4" ;; esac ;;
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


def make(project: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["make", *arguments], cwd=project, capture_output=True, text=True)


def repro(project: Path, *arguments: str) -> None:
    done = make(project, "-s", "repro", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, "dvc repro\n", "")


def test_a_run_file_whose_path_has_a_space_is_run(project):
    run = project / "a folder" / "run.toml"
    run.parent.mkdir()
    run.write_text("# a run\n")
    repro(project, f"RUN={run}")
    assert (project / "params" / "run.toml").read_text() == "# a run\n"


def test_an_edited_run_file_that_nothing_keeps_is_not_overwritten(project):
    tiny.git(project, "init", "-q")
    run, other = project / "params" / "run.toml", project / "other.toml"
    run.write_text("committed\n")
    other.write_text("mine\n")
    tiny.git(project, "add", "params")
    tiny.commit(project, "a")
    repro(project, f"RUN={other}")  # over what is committed
    other.write_text("mine, edited\n")
    repro(project, f"RUN={other}")  # over what this put there
    run.write_text("edited\n")
    done = make(project, "-s", "repro", f"RUN={other}")
    assert done.returncode and done.stderr.startswith(f"RUN={other}: params/run.toml")
    assert "dvc" not in done.stdout and run.read_text() == "edited\n"
    shutil.copy(run, project / "params" / "kept here.toml")
    repro(project, f"RUN={other}")
    assert run.read_text() == "mine, edited\n"


@pytest.mark.parametrize(
    ("program", "dies"),
    [
        ("python", "exit 1"),  # a mistyped RUN=
        ("python", "echo kil; exit 1"),
        ("cp", "exit 1"),
        ("cp", ': > "$2"; exit 1'),
        ("cp", 'echo kil > "$2"; exit 1'),
        ("cp", '/bin/cp "$1" "$2"; exit 1'),
        ("mv", "exit 1"),
    ],
)
def test_after_a_kill_anywhere_a_run_file_that_this_put_there_is_known_as_such(
    project, program, dies
):
    tiny.git(project, "init", "-q")
    run, first, other = (project / name for name in ("params/run.toml", "a.toml", "b.toml"))
    first.write_text("killed before\n")
    other.write_text("kil\nis what is left of this\n")
    repro(project, f"RUN={first}")
    stand_in, kept = project / ".venv" / "bin" / program, PYTHON if program == "python" else ""
    for _ in range(2):
        stand_in.write_text(f"#!/bin/sh\n{dies}\n")
        stand_in.chmod(0o755)
        assert make(project, "-s", "repro", f"RUN={other}").returncode
        stand_in.write_text(kept) if kept else stand_in.unlink()
        done = make(project, "-s", "repro", "RUN=mistyped.toml")
        assert done.returncode and "mistyped.toml: No such file" in done.stderr
    repro(project, f"RUN={first}")
    assert run.read_text() == "killed before\n"
    assert [path.name for path in (project / "data").iterdir()] == [".run.toml"]


@pytest.mark.parametrize(("content", "stays"), [("", False), ('{"a": {', False), ("{}", True)])
def test_what_a_killed_dvc_left_half_written_does_not_stop_the_next(project, content, stays):
    lock = project / ".dvc" / "tmp" / "rwlock"
    lock.parent.mkdir(parents=True)
    lock.write_text(content)
    repro(project)
    assert lock.exists() == stays


@pytest.mark.parametrize(
    ("flags", "folder", "extras"),
    [
        ([], ".venv", "engines"),
        (["GPU=1"], ".venv-gpu", "engines,cuda13"),
        (["GPU=1", "CUDA=13"], ".venv-gpu", "engines,cuda13"),
        (["GPU=1", "CUDA=12"], ".venv-gpu", "engines,cuda12"),
    ],
)
def test_a_gpu_has_its_packages_in_an_environment_of_its_own(project, flags, folder, extras):
    shutil.rmtree(project / ".venv")
    said = make(project, "-n", "repro", *flags).stdout
    assert f"venv {folder}\n" in said and f"-e '.[{extras}]'" in said
    assert ("constraints-gpu.txt constraints.txt >" in said) == bool(flags)
    assert (PROJECT / ".gitignore").read_text().count(f"/{folder}/\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["GPU=cuda12"], "GPU=cuda12: expected 1, and CUDA=12 or CUDA=13."),
        (["GPU=1", "CUDA=11"], "CUDA=11: expected 12 or 13."),
        (["CUDA=12"], "CUDA=12: expected GPU=1 beside it."),
        (["GPU=1", "CUDA=12"], "CUDA=12: .venv-gpu is for CUDA 13, expected CUDA=13, or rm -rf"),
    ],
)
def test_a_cuda_that_there_is_not_is_one_line(project, flags, said):
    (project / ".venv-gpu").mkdir()
    (project / ".venv-gpu" / "cuda").write_text("13\n")
    assert (done := make(project, *flags)).returncode and said in done.stderr


def test_an_environment_that_was_copied_with_its_checkout_is_one_line(project):
    made, copy = project / "first", project / "a copy"
    shutil.copytree(project, made, ignore=lambda *_: ["first"])
    config = f"version = 3.12\ncommand = /usr/bin/python3 -m venv {made / '.venv'}\n"
    (made / ".venv" / "pyvenv.cfg").write_text(config)
    repro(made)
    shutil.copytree(made, copy)
    done = make(copy, "-s", "repro")
    assert done.returncode and str(made / ".venv") in done.stderr and not done.stdout
    assert done.stderr.count("\n") == 1 and "make clean" in done.stderr
    assert make(copy, "clean").returncode == 0 and not (copy / ".venv").exists()
    made.rename(project / "moved")
    assert make(project / "moved", "-s", "repro").returncode


@pytest.mark.parametrize(("flags", "least"), [([], "3.11"), (["GPU=1"], "3.12")])
def test_a_python_that_is_too_old_is_one_line_before_pip_begins(project, flags, least):
    shutil.rmtree(project / ".venv")
    old = project / "python-3.10"
    asked = "import sys; sys.version_info = (3, 10); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{asked}" "$2"\n')
    old.chmod(0o755)
    done = make(project, "repro", f"PYTHON={old}", *flags)
    first, *rest = done.stderr.splitlines()
    assert first == f"PYTHON={old}: found Python 3.10, expected {least} or later"
    assert done.returncode and len(rest) == 1 and rest[0].startswith("make")
