"""The benchmark of accelerators, on a CPU: sections run and fail as they should; all, in soak."""

import json
import subprocess
import sys
import tomllib

import pytest

from benchmarks import gpu
from benchmarks.accelerator import suspects
from benchmarks.accelerator.extent import TOY
from benchmarks.accelerator.proof import said_of
from pipeline.audit.verdict import Finding
from pipeline.stage.keys import PROJECT
from tests import tiny


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The lines of every section, by its name: all in this process, with programs in common."""
    work = tmp_path_factory.mktemp("work")
    with tiny.like_a_process(), pytest.MonkeyPatch.context() as patch:
        for module in ("simulated", "trial"):
            patch.setattr(f"benchmarks.{module}.programs_of", tiny.programs_in_common)
        return {name: list(gpu.lines_of(name, "toy", work, 600)) for name in gpu.SECTIONS}


@pytest.mark.soak
def test_every_section_gives_lines_without_errors(lines):
    for name, found in lines.items():
        assert [line["error"] for line in found if "error" in line] == []
        assert found and {line["section"] for line in found} == {name}
        json.dumps(found, allow_nan=False)
    goals = [line for found in lines.values() for line in found if "goal" in line]
    gradients = len(list(suspects.variants(TOY.suspects)))
    assert len(goals) == 4 + gradients and all(
        line["met"] is None for line in goals
    )  # none is a CPU's


@pytest.mark.soak
def test_a_run_has_the_same_bits_again_and_its_audits_find_nothing(lines):
    (bits,), (audit,) = (lines[name] for name in ("bits", "audit"))
    assert bits["equal"] and audit["third_run_equal"]
    assert (audit["windows"], audit["findings"]) == (4, 0)


def test_the_first_finding_of_an_audit_is_said():
    found = [Finding(3, 1, "message", "0.7", applied=True), Finding(4, 1, "message", "0.8", True)]
    assert said_of(found) == {"findings": 2, "first_finding": "round 3, peer 1, message: 0.7"}
    assert said_of([]) == {"findings": 0, "first_finding": None}


@pytest.mark.soak
def test_a_run_by_rules_is_audited_bit_for_bit_on_a_cpu(lines):
    (ours,), (theirs,), (step,) = (
        lines[name] for name in ("by_rules", "by_rules_on_cpu", "steps_by_rules")
    )
    assert ours["product_bits"] == theirs["product_bits"] == 8
    assert (theirs["windows"], theirs["findings"]) == (4, 0)
    assert theirs["params_equal"]
    assert set(step["ratio"]) == {"as compiled", "20 bits", "8 bits"}


def run(*options: str) -> tuple[int, list[dict]]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--size", "toy", *options]
    environment = tiny.environment(PROJECT)
    done = subprocess.run(command, env=environment, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_section_over_its_time_is_ended_and_one_without_time_is_not_begun(tmp_path):
    status, lines = run("--sections", "machine,gradient", "--seconds", "0.7")
    assert [line["section"] for line in lines] == ["machine", "gradient"]
    assert [line["ended"] for line in lines] == ["not begun", "after its time"]
    assert status == 1


def test_a_section_that_fails_says_why_and_the_next_one_runs(tmp_path):
    (tmp_path / "shards").write_text("a file where a folder is expected")
    status, lines = run("--sections", "audit", "--work", str(tmp_path))
    error, ended = lines
    assert "holds no run, expected that of section bits" in error["error"]
    assert (status, ended["ended"]) == (1, "well")


def test_what_is_needed_is_what_the_project_depends_on_and_is_here():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    named = [line for line in project["dependencies"] if line.startswith(gpu.NEEDED)]
    assert len(named) == len(gpu.NEEDED)
    assert list(gpu.lines_of_check()) == []
