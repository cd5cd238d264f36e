"""`lockstep check` looks at the names of tasks, and at the package that runs them."""

import pytest

from pipeline.preflight.row import Mark
from tests.pipeline.preflight.looks import check_lacking, looks, said, written


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("[evaluate] tasks", {"evaluate__tasks": ["arc_easy"]}),
        ("[evaluate] sample_tasks", {"evaluate__every": 1, "evaluate__sample_tasks": ["arc_easy"]}),
    ],
)
def test_lm_eval_that_is_not_installed_is_a_row_that_fails(key, changes, tmp_path, monkeypatch):
    check_lacking(monkeypatch, tmp_path, key, "lm_eval", **changes)


def test_a_task_that_nobody_knows_is_a_row_that_fails(tmp_path):
    run_file = written(tmp_path, evaluate__tasks=["next_line", "no/such/task.yaml"])
    assert "no/such/task.yaml" in said(looks(run_file, tmp_path), Mark.FAILS)["tasks"]
