"""A run file on disk loads whole, or one line says why it does not."""

import subprocess
import sys
import tomllib

import pytest

from pipeline import runfile
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.errors import refused

DEFAULT = PROJECT / "params" / "run.toml"


def test_default_run_loads_and_has_every_table():
    assert set(tomllib.loads(DEFAULT.read_text())) == set(runfile.Run.model_fields)
    run = runfile.load(DEFAULT)
    assert run.peers.count == 4
    assert isinstance(run.llm.checkpoint, runfile.CheckpointInit)
    assert isinstance(run.llm.data_location, runfile.DataCorpus)


@pytest.mark.parametrize("file", tiny.READY_RUNS, ids=lambda f: f.name)
def test_every_run_file_of_the_project_loads(file):
    assert runfile.load(file).config.total_steps > 0


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"[config]\nwarmup_time = \n", 2),
        (b"[config]\n\nwarmup_time 3\n", 3),
        (b"[config]\na = 1\na = 2\n", 3),
        (b"a = '''\n\n", 3),
        (b"[config]\n# \xff\n", 2),
    ],
)
def test_file_that_is_no_toml_is_refused_with_its_line(tmp_path, content, line):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with refused(f"{path}:{line}"):
        runfile.load(path)


@pytest.mark.parametrize("content", ["a = " + "[" * 5000 + "]" * 5000, "a = " + "1" * 5000])
def test_file_beyond_the_parsers_limits_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "huge.toml"
    path.write_text(content)
    with refused(path):
        runfile.load(path)


@pytest.mark.parametrize(
    "content",
    [
        "# " + "x" * 2**20,
        ".".join("a" * 20_000) + " = 1",
        "[" + " . ".join(['"a"'] * 20_000) + "]",
        "a = {" + ".".join("a" * 20_000) + " = 1}",
    ],
    ids=["large", "deep key", "deep table", "deep inline"],
)
def test_file_that_would_take_long_to_parse_is_refused_before_that(tmp_path, content, monkeypatch):
    path = tmp_path / "huge.toml"
    path.write_text(content)
    monkeypatch.setattr(tomllib, "loads", lambda _: pytest.fail("is parsed"))
    with refused(path):
        runfile.load(path)


def test_missing_file_and_folder_are_refused_by_name(tmp_path):
    with refused(tmp_path / "none.toml"):
        runfile.load(tmp_path / "none.toml")
    with refused(tmp_path):
        runfile.load(tmp_path)


def test_reading_a_run_file_imports_nothing_heavy():
    heavy = ("jax", "numpy", "optax")
    code = f"import sys, pipeline.runfile; print([m for m in {heavy} if m in sys.modules])"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PROJECT)
    assert printed.strip() == "[]"
