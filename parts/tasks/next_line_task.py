"""The task next_line of a run: asked of a model, and written as files for others.

`lm_eval --model hf --model_args pretrained=data/export --tasks data/evaluate/tasks/next_line.yaml`
asks the same questions of the same model.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from lockstep.files import write_text
from parts.tasks import choices, held_out_texts, next_line
from parts.tasks.choices import AskedQuestions, Scores
from parts.tasks.next_line import NAME, Question
from parts.tasks.task_model import TaskModel
from pipeline import runfile
from pipeline.scores import TaskResult

FEWEST = 20  # questions; the interval of fewer says nothing
QUESTIONS, DEFINITION, SCORES = f"{NAME}.jsonl", f"{NAME}.yaml", f"{NAME}.scores.jsonl"


def prepare(
    run: runfile.Run, shards: Path, model: TaskModel, count: int, notes: list[str]
) -> AskedQuestions | None:
    """Return the questions of a run's held-out text for a model, or None if there are too few.

    There are `count` at most; `notes` gains the reason if there are none. `shards` is the folder
    that the stage download left.
    """
    texts = held_out_texts.documents(run, shards, model.tokenizer)
    found = next_line.questions(texts)
    asked = choices.ask(found, model.tokenizer, model.beginning, model.context, count)
    if len(asked.questions) < FEWEST:
        notes.append(
            f"the held-out text gives {len(asked.questions)} questions for {NAME}, "
            f"expected at least {FEWEST} lines in one column that fit into the model"
        )
        return None
    return asked


def result(
    asked: AskedQuestions, model: TaskModel, advance: Callable[[int], None] | None = None
) -> tuple[TaskResult, Scores]:
    """Ask the questions, and return the result and each choice's scores.

    `advance` is called with the number of requests that have been scored since the last call.
    """
    scores = choices.scores_of(
        asked, model.log_likelihoods(asked.requests, advance or (lambda _: None))
    )
    found = TaskResult(
        name=NAME,
        metrics=choices.metrics(asked.questions, scores),
        chance=1 / next_line.CHOICES,
        documents=len(asked.questions),
        few_shot=0,
        sha256=hashlib.sha256(to_jsonl(asked.questions).encode()).hexdigest(),
        source="held-out text of the run",
    )
    return found, scores


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
