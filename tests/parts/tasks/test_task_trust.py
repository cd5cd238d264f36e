"""A task runs no code but lm_eval's own, unless the run file trusts it."""

import sys
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from parts.tasks import lm_eval_tasks
from tests.errors import refused
from tests.parts.tasks import exported

TASK = """task: theirs
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: !function kind.f
doc_to_target: a
doc_to_choice: "{{{{c}}}}"
metric_list: [{{metric: {metric}}}]
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Writes a task of somebody's whose function leaves a file `ran`, and returns its path."""
    exported.go_offline(monkeypatch)
    (tmp_path / "data.jsonl").write_text('{"q": "Which?", "c": ["a", "b"], "a": 0}\n' * 3)
    ran = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (tmp_path / "kind.py").write_text(f"{ran}def f(document):\n    return document['q'].upper()\n")

    def write(metric: str = "acc") -> Path:
        path = tmp_path / "theirs.yaml"
        path.write_text(TASK.format(data=tmp_path / "data.jsonl", metric=metric))
        return path

    return write


def load(path: Path, *, trusted: bool) -> list[lm_eval_tasks.Loaded]:
    store = path.parent / "store"
    with lm_eval_tasks.data_in(store, trusted=trusted):
        return lm_eval_tasks.load([str(path)], store, trusted=trusted)


def test_a_yaml_file_is_refused_unread_unless_the_run_file_trusts_it(theirs, tmp_path):
    path = theirs()
    for look in (
        lambda: load(path, trusted=False),
        lambda: lm_eval_tasks.check_known([str(path)], trusted=False),
    ):
        with refused(str(path), lm_eval_tasks.TRUST_KEY):
            look()
    assert not (tmp_path / "ran").exists()
    [loaded] = load(path, trusted=True)
    assert loaded.tasks["theirs"].doc_to_text({"q": "Which?"}) == "WHICH?"
    assert (tmp_path / "ran").exists()


def test_a_metric_that_is_fetched_as_code_is_refused(tmp_path):
    from lm_eval.api import task

    before = sys.modules.get("evaluate")
    with lm_eval_tasks.data_in(tmp_path):
        for metric, from_hub in (("evil/evil", False), ("acc", True)):
            with refused(metric, lm_eval_tasks.TRUST_KEY):
                task.get_metric(metric, from_hub)
        assert task.get_metric("acc")
        with pytest.raises(ModuleNotFoundError) as missing:
            import evaluate  # noqa: F401
    assert lm_eval_tasks.TRUST_KEY in lm_eval_tasks.reason(missing.value)
    assert sys.modules.get("evaluate") is before


def test_a_group_of_a_file_has_members(theirs, tmp_path):
    theirs()
    group = tmp_path / "group.yaml"
    for members, said in (("[theirs]", None), ("[deep]", "deep"), ("[]", "a group without tasks")):
        group.write_text(f"group: mine\ntask: {members}\n")
        if said:
            with pytest.raises(LockstepError, match=rf"{group}: .*{said}"):
                load(group, trusted=True)
        else:
            [loaded] = load(group, trusted=True)
            assert list(loaded.tasks) == ["theirs"]
