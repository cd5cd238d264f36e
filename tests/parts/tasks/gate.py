"""What `evaluate` reads of a task, for the table of tests/gate."""

import json
from pathlib import Path

from parts.tasks import lm_eval_tasks
from tests.gate.cases import BOMB, DEVICE, PIPE, SPARSE, No
from tests.gate.folders import ALONE, FolderRow

DATA = No("a task's data may be large")


def _task(folder: Path) -> None:
    (folder / "docs.jsonl").write_text('{"t": "a text"}\n')
    definition = {
        "task": "theirs",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{t}}",
    }
    (folder / "theirs.yaml").write_text(json.dumps(definition))


def _evaluate(folder: Path, out: Path) -> None:
    with lm_eval_tasks.data_in(out, trusted=True):
        lm_eval_tasks.load([str(folder / "theirs.yaml")], out, trusted=True)


FOLDERS = [
    FolderRow(
        "`evaluate`: a task's data",
        _task,
        "docs.jsonl",
        _evaluate,
        {PIPE: "expected its data", DEVICE: "expected its data", SPARSE: DATA, **ALONE, BOMB: DATA},
    )
]
