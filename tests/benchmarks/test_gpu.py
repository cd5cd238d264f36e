"""The benchmark of accelerators, on a CPU: sections run and fail as they should; all, in soak."""

import json
import tomllib

import pytest

from benchmarks import gpu
from benchmarks.accelerator.extent import judged
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
    speeds = ("gradient", "suspects", "share", "memory", "simulated", "steps_by_rules")
    judged = [[line for line in lines[name] if "goal" in line] for name in speeds]
    assert all(judged)
    for line in (line for found in judged for line in found):
        assert line["goal"] > 0 and line["met"] is None  # no goal of speed is a CPU's


@pytest.mark.soak
def test_a_gradient_by_recorded_choices_is_compared_with_one_without(lines):
    for name in ("untuned", "tuned", "reloaded", "reloaded_again"):
        assert lines[name][0]["hash"] == lines["untuned"][0]["hash"]  # a CPU has no choices
    assert lines["reloaded"][0]["value"] > 0
    assert lines["reloaded_again"][0]["met"] is True


@pytest.mark.soak
def test_the_default_run_by_rules_has_the_params_that_are_stated(lines):
    (line,) = lines["default_run"]
    assert line["rounds"] == 2
    assert line["params"] == line["expected"]


@pytest.mark.soak
def test_a_visit_compiles_for_all_sections_before_the_first_and_ends_with_a_page(tmp_path):
    status, lines, page = run("--visit", "--seconds", "1200", "--work", str(tmp_path))
    parts = sum(section.parts for section in gpu.VISIT.values())
    assert all("compiled" in line for line in lines[:parts])
    assert [line["section"] for line in lines[parts:] if "ended" in line] == list(gpu.VISIT)
    whats = [line["what"] for line in lines if "what" in line]
    assert len(whats) >= 5 and all(what in page for what in whats)
    assert status == 0


def test_what_a_visit_compiled_is_there_when_it_is_measured(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    compiled, *lines = gpu.visit(["machine"], "toy", tmp_path, 1200)
    assert (compiled["compiled"], compiled["how"]) == ("machine", "well")
    assert list((tmp_path / "compiled").iterdir())
    assert lines[-1]["ended"] == "well" and len(lines) == 4


def test_a_page_has_each_figure_beside_its_goal_and_what_went_wrong():
    lines = [
        judged("speed", 0.5, 0.9, False) | {"section": "a"},
        judged("bits", True, True, True) | {"section": "b"},
        {"section": "c", "error": "no memory"},
        {"section": "c", "ended": "after its time"},
    ]
    speed, bits, error, ended = gpu.page(lines)
    assert speed.split() == ["speed", "0.5", "0.9", "MISSED"]
    assert bits.split() == ["bits", "True", "True", "met"]
    assert "no memory" in error and "after its time" in ended


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
    assert set(step["ratio"]) == {"as compiled", "8 bits", "bfloat16"}


def run(*options: str) -> tuple[int, list[dict], str]:
    done = tiny.python("-m", "benchmarks.gpu", "--size", "toy", *options)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_section_over_its_time_is_ended_and_one_without_time_is_not_begun(tmp_path):
    status, lines, _ = run("--sections", "machine,gradient", "--seconds", "0.7")
    assert [line["section"] for line in lines] == ["machine", "gradient"]
    assert [line["ended"] for line in lines] == ["not begun", "after its time"]
    assert status == 1


def test_a_section_that_fails_says_why_and_the_next_one_runs(tmp_path):
    (tmp_path / "shards").write_text("a file where a folder is expected")
    status, lines, _ = run("--sections", "audit", "--work", str(tmp_path))
    error, ended = lines
    assert "holds no run, expected that of section bits" in error["error"]
    assert (status, ended["ended"]) == (1, "well")


def test_what_is_needed_is_what_the_project_depends_on_and_is_here():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    named = [line for line in project["dependencies"] if line.startswith(gpu.NEEDED)]
    assert len(named) == len(gpu.NEEDED)
    assert list(gpu.lines_of_check()) == []
