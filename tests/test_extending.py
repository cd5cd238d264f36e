"""The additions of docs/how-to/extend.md, made in a copy as it says, work together in a run."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests import tiny

PAGE = tiny.PROJECT / "docs" / "how-to" / "extend.md"
BLOCKS = re.findall(r"```python\n# ([^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL)
NEW = re.compile(r"new: (\S+)$")
EDIT = re.compile(r'(above|below|in place of) "(.*)" in (\S+)$')
ELSEWHERE = "outside of the pipeline"
MODEL = {key: value for key, value in tiny.MODEL.items() if key != "model_type"}
RUN = """
from pathlib import Path
from pipeline.__main__ import _stage
for stage in ("download", "convert", "train", "witness"):
    _stage(stage, Path("params/run.toml"), Path("."))
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
def project(tmp_path_factory) -> Path:
    """A copy with all additions, that has trained with them and been audited."""
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
    for where, code in BLOCKS:
        if not where.startswith(ELSEWHERE):
            apply(project, where, code)
    (project / "output.txt").write_text(tiny.run(project, sys.executable, "-c", RUN))
    return project


def test_each_costs_as_many_files_as_the_page_counts():
    changed = {EDIT.match(where)[3] for where, _ in BLOCKS if EDIT.match(where)}
    added = {NEW.match(where)[1] for where, _ in BLOCKS if NEW.match(where)}
    assert {Path(name).parent.name for name in added} == {"optim", "models", "sources"}
    assert len(changed) == 2 + 1 + 2 + 2


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
    imported = set(re.findall(r"^(?:import|from) (?!pipeline\.optim\.)(\w+)", code, re.MULTILINE))
    assert imported <= {"jax", "flax", "optax"}
    names: dict = {}
    exec(code, names)
    assert names["loss"].shape == (2,)
    assert float(names["loss"].max()) < 0.02  # from 0.8
