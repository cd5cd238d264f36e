"""The plan of a comparison: it has another name where its file, its bases or the code changed."""

import itertools

import yaml

from lockstep.machine import cores
from parts.comparison import commands, plan_file, training_process
from pipeline.stage.keys import PROJECT
from tests.parts.comparison.examples import BASE


def test_a_comparison_is_planned_anew_where_a_base_of_its_base_changed(tmp_path):
    (tmp_path / "c.toml").write_text(f'base = "{tmp_path}/b.toml"')
    found = set()
    for name, base in (("b", "a"), ("a", "z")):
        (tmp_path / f"{name}.toml").write_text(f'base = "{base}.toml"')
    for seed in (0, 1):
        (tmp_path / "z.toml").write_text(f"[peers]\nseed = {seed}")
        found.add(plan_file.plan_path(tmp_path / "c.toml"))
    assert len(found) == 2


def test_a_comparison_is_planned_anew_where_code_changed_that_a_stage_reads():
    stages = yaml.safe_load((PROJECT / "dvc.yaml").read_text())["stages"]
    read = {dep for name in (*training_process.INPUTS, "train") for dep in stages[name]["deps"]}
    source = {dep.partition("/")[0] for dep in read} - {"data", "params"}
    assert source and source <= {*plan_file.CODE}
    assert "dvc.yaml" in plan_file.CODE  # which says what a stage reads


def test_the_hours_are_by_the_time_that_a_product_has_of_the_cores(monkeypatch):
    monkeypatch.setattr(commands.time, "process_time", itertools.count(0, 0.25).__next__)
    said = commands._hours(BASE, 10**9)
    assert f" {cores.count() * 8 * 1024**3 / 1e9:,.0f} GFLOP/s " in said
