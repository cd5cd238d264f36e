"""The additions of docs/how-to/extend.md, made in a copy as it says, work together in a run."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.stage.keys import RUN_FILE
from tests import tiny

pytestmark = pytest.mark.long

PAGE = tiny.PROJECT / "docs" / "how-to" / "extend.md"
BLOCKS = re.findall(r"```python\n# ([^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
NEW = re.compile(r"new: (\S+)$")
EDIT = re.compile(r'(above|below|in place of) "(.*)" in (\S+)$')
ELSEWHERE = "outside of the pipeline"
MODEL = {key: value for key, value in tiny.MODEL.items() if key != "model_type"}
TESTS = (  # of all that is listed or generated
    "tests/lockstep/methods/test_cards.py",
    "tests/lockstep/tables/test_validation.py",
    "tests/pipeline/runfile/test_rules.py::test_every_kind_of_fault_loads_in_a_run_that_has_what_it_needs",
    "tests/pipeline/runfile/test_variants.py::test_every_variant_loads_and_is_written_back_as_it_was",
    "tests/pipeline/runfile/test_schema.py",
    "tests/lockstep/swarm/test_lies.py",
    "tests/lockstep/wire/test_leaves.py",
    "tests/lockstep/optim/test_expect.py::test_every_builder_is_tested",
    "tests/parts/new/test_new.py::test_a_new_run_of_each_optimizer_loads_and_every_message_is_in_time",
    "tests/parts/new/test_new.py::test_stated_rates_and_tables_are_those_of_the_files_that_are_named",
    "tests/parts/new/test_new.py::test_help_lists_the_optimizers_and_bounds_of_the_library",
    "tests/test_docs.py",
    "tests/test_habits.py",
)
RUN = """
from pathlib import Path
from pipeline.run_stage import run_stage
for stage in ("download", "convert", "train", "witness"):
    run_stage(stage, Path("params/run.toml"), Path("."))
"""


def apply(project: Path, where: str, code: str) -> None:
    """Make one change of the page."""
    if new := NEW.match(where):
        assert not (project / new[1]).exists()
        (project / new[1]).write_text(code)
        return
    how, anchor, name = EDIT.match(where).groups()
    lines = (project / name).read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith(anchor))
    if how == "above" and not lines[at].startswith(" "):
        code += "\n\n"
    first, last = {"above": (at, at), "below": (at + 1, at + 1), "in place of": (at, at + 1)}[how]
    (project / name).write_text("".join([*lines[:first], code, *lines[last:]]))


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy with all additions, its tests too, and what `make generated` writes."""
    folder = tmp_path_factory.mktemp("extended")
    project = tiny.make_project(
        folder,
        config__total_steps=3,
        model__LLM__architecture="HfAuto",
        model__LLM__optimizer={"Lion": {"b1": 0.9, "b2": 0.99, "weight_decay": 0.1}},
        model__LLM__data_location={"Glob": f"{folder}/tok*/*.ds"},
        model__LLM__checkpoint={
            "Init": {"seed": 0, "config": MODEL | {"model_type": "seed_oss", "head_dim": 8}}
        },
        faults__schedule=[{"kind": "misplaced", "peer": 1, "rounds": [2, 2]}],
    )
    shutil.copytree(
        tiny.PROJECT / "tests", project / "tests", ignore=shutil.ignore_patterns("__py*")
    )
    for where, code in BLOCKS:
        if not where.startswith(ELSEWHERE):
            apply(project, where, code)
    makefile = (project / "Makefile").read_text()
    (recipe,) = re.findall(r"^generated:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    tiny.run(project, "sh", "-ec", recipe.replace("python", sys.executable))
    return project


@pytest.fixture(scope="module")
def project(copy) -> Path:
    """The copy, that has trained with the additions and been audited."""
    (copy / "output.txt").write_text(tiny.run(copy, sys.executable, "-c", RUN))
    return copy


def test_each_costs_as_many_files_as_the_page_counts():
    edits = [EDIT.match(where)[3] for where, _ in BLOCKS if EDIT.match(where)]
    changed = {name for name in edits if not name.startswith("tests/")}
    added = {NEW.match(where)[1] for where, _ in BLOCKS if NEW.match(where)}
    folders = {Path(name).parent.name for name in added}
    assert folders == {"optim", "methods", "leaves", "models", "token_files"}
    assert len(changed) == 0 + 1 + 0 + 2 + 2


def test_the_tests_that_follow_from_the_tables_pass_in_the_copy(copy):
    """Whoever follows the page to the letter finds no test red."""
    run_file = copy / RUN_FILE
    tiny_run = run_file.read_text()
    shutil.copy(tiny.PROJECT / RUN_FILE, run_file)  # which tests read
    try:
        chosen = "not example_runs and not budget"
        command = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", chosen)
        said = tiny.run(copy, *command, *TESTS)
    finally:
        run_file.write_text(tiny_run)
    assert "passed" in said and "failed" not in said


def test_the_added_location_is_what_the_run_read(project):
    shards = json.loads((project / "data/shards/shards.json").read_text())
    assert shards["source"]["read"].endswith("/tok*/*.ds")


def test_the_added_model_has_its_biases(project):
    from safetensors.numpy import load_file

    params = load_file(project / "data/init/params.safetensors")
    assert "layers/attention/query/bias" in params
    assert "layers/attention/out/bias" not in params


def test_the_added_fault_fires_and_the_audit_finds_it(project):
    """Messages are dense, so its window is replayed for all peers together, bit for bit."""
    assert "fault misplaced fired 1 times" in (project / "output.txt").read_text()
    verdict = json.loads((project / "data/verdict/verdict.json").read_text())
    assert not verdict["accepted"]
    assert [finding["peer"] for finding in verdict["findings"]] == [1]


@pytest.mark.parametrize("where", [ELSEWHERE, f"{ELSEWHERE}, under shard_map"])
def test_the_example_outside_of_the_pipeline_learns(where):
    (code,) = [code for of_block, code in BLOCKS if of_block == where]
    assert len([line for line in code.splitlines() if line]) <= 33
    imported = set(re.findall(r"^(?:import|from) (?!lockstep\.optim\.)(\w+)", code, re.MULTILINE))
    assert imported <= {"jax", "flax", "optax"}
    names: dict = {}
    exec(code, names)
    assert names["loss"].shape == (2,)
    assert float(names["loss"].max()) < 0.02  # from 0.8
