"""A run file on disk loads whole, or one line says why it does not."""

import tomllib

import pytest

from lockstep.methods.card import OptimizerVariant
from lockstep.methods.schedule import ScheduleVariant
from pipeline import runfile
from pipeline.runfile import CheckpointVariant, DataCorpus
from pipeline.stage.keys import PROJECT, RUN_FILE
from pipeline.toml_file import KINDS, read_run_file, written_whole
from tests import tiny
from tests.errors import refused

# ---- A run file on disk loads whole, or one line says why it does not ----

DEFAULT = PROJECT / "params" / "run.toml"


def test_default_run_has_every_table():
    assert set(tomllib.loads(DEFAULT.read_text())) == set(runfile.Run.model_fields)


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
    for read in (runfile.load, written_whole):
        with refused(f"{path}:{line}"):
            read(path)


@pytest.mark.parametrize("content", ["a = " + "[" * 5000 + "]" * 5000, "a = " + "1" * 5000])
def test_file_beyond_the_parsers_limits_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "huge.toml"
    path.write_text(content)
    with refused(path):
        runfile.load(path)


@pytest.mark.parametrize("number", ["0x" + "f" * 4000, 2**64, -(2**63) - 1])
def test_a_number_beyond_64_bits_is_refused_with_its_key(tmp_path, number):
    path = tmp_path / "huge.toml"
    path.write_text(f"[[a.b]]\nc = 1\n[[a.b]]\nc = [0, {{ d = {number} }}]\n")
    with refused(f"{path}: a.b[1].c[1].d ", "64 bits"):
        runfile.load(path)
    path.write_text(f"a = {2**64 - 1}\nb = {-(2**63)}\nc = true")
    assert read_run_file(path) == {"a": 2**64 - 1, "b": -(2**63), "c": True}


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


# ---- A run file that says only how it differs from another, and is written whole ----

BASE = """\
# The base.

# Of peers.
[peers]
count = 4          # how many
seed = 0
# Above.
layout = "each"

[model.LLM.optimizer.SGD]
momentum = 0.9
nesterov = true

# Last.
[links]
upload_mbps = [
    1, 2,
]
"""
CHANGES = """\
# The file.
base = "base.toml"
[peers]
count = 8
[model.LLM.optimizer.AdamW]
eps = 1e-8         # small
[faults]
schedule = []
"""
HEAD = """\
# The file.
#
# Written whole from file.toml, which has what differs from its base.

"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "base.toml").write_text(BASE)
    path = tmp_path / "file.toml"
    path.write_text(CHANGES)
    return path


def test_a_file_is_written_whole_under_its_own_first_comment(file):
    written = written_whole(file)
    assert written.startswith(f"{HEAD}[peers]\n")
    assert tomllib.loads(written) == read_run_file(file)
    assert written_whole(file.with_name("base.toml")) == BASE


def test_a_base_may_have_a_base(file):
    third = file.with_name("third.toml")
    third.write_text('# Third.\nbase = "file.toml"\n\n[peers]\nseed = 3\n')
    assert read_run_file(third)["peers"] == {"count": 8, "seed": 3, "layout": "each"}
    assert tomllib.loads(written_whole(third)) == read_run_file(third)


@pytest.mark.parametrize("base", ["3", '"none.toml"', '"../file.toml"', '"/etc/passwd"'])
def test_a_base_is_a_file_beside_it(file, base):
    file.write_text(f"base = {base}\n")
    with refused(file, "base"):
        read_run_file(file)


@pytest.mark.parametrize("name", ["base", "file"])
def test_no_file_is_its_own_base(file, name):
    file.with_name(f"{name}.toml").write_text('base = "file.toml"\n')
    with refused("base", "file.toml"):
        read_run_file(file)


def test_what_is_replaced_whole_are_the_enums_of_the_run_file():
    enums = {OptimizerVariant, ScheduleVariant, CheckpointVariant, DataCorpus}
    assert {enum.where for enum in enums} == set(KINDS)


@pytest.mark.parametrize("file", tiny.READY_RUNS, ids=lambda f: f.name)
def test_every_ready_run_can_be_written_whole(file):
    assert tomllib.loads(written_whole(file)) == read_run_file(file)


@pytest.mark.parametrize("file", tiny.READY_RUNS, ids=lambda f: f.name)
def test_a_ready_run_that_has_its_own_rate_takes_no_step_sizes_by_group_from_another(file):
    """Factors by group were measured with one rate, which says little without them."""
    alone = tomllib.loads(file.read_text()).get("model", {}).get("LLM", {})
    base = runfile.load(PROJECT / "params" / "default.toml").llm.lr_schedule.base_lr
    rates = {schedule["base_lr"] for schedule in alone.get("lr_schedule", {}).values()}
    assert "optimizer" in alone or rates <= {base}


def test_the_default_run_is_the_base_of_the_others():
    default = PROJECT / "params" / "default.toml"
    assert (PROJECT / RUN_FILE).read_bytes() == default.read_bytes(), "edit both, or `git restore`"
