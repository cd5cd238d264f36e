"""The task next_line as files, for others: its questions, lm-eval's definition, and the scores.

`lm_eval --model hf --model_args pretrained=data/export --tasks data/evaluate/tasks/next_line.yaml`
asks the same questions of the same model.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import yaml

from lockstep.files import write_text
from parts.tasks.choices import AskedQuestions, Scores
from parts.tasks.next_line import NAME, Question

QUESTIONS, DEFINITION, SCORES = f"{NAME}.jsonl", f"{NAME}.yaml", f"{NAME}.scores.jsonl"


def to_jsonl(questions: Iterable[Question]) -> str:
    """Return questions as JSON lines: context, choices, and the answer's number, from 0."""
    return "".join(_line(question._asdict()) for question in questions)


def write(folder: Path, named: str, asked: AskedQuestions, scores: Scores) -> None:
    """Write next_line.jsonl, next_line.yaml and next_line.scores.jsonl to a folder.

    The definition names the folder `named`: its path from where lm_eval runs.
    """
    definition = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{named}/{QUESTIONS}"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",  # a choice begins with its line break
        "metric_list": [{"metric": name} for name in ("acc_mutual_info", "acc", "acc_bytes")],
        "metadata": {"version": 1},
    }
    write_text(folder / QUESTIONS, to_jsonl(asked.questions))
    write_text(folder / DEFINITION, yaml.safe_dump(definition, sort_keys=False))
    lines = (
        {"question": number, "answer": question.answer, "after": after, "alone": alone}
        for number, (question, after, alone) in enumerate(
            zip(asked.questions, scores.after_NC.tolist(), scores.alone_NC.tolist(), strict=True)
        )
    )
    write_text(folder / SCORES, "".join(map(_line, lines)))


def _line(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
