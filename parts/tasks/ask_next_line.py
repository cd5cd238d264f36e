"""The task next_line of a run: its questions, asked of a model, and what came of it."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from parts.tasks import choices, held_out_texts, next_line
from parts.tasks.choices import AskedQuestions, Scores
from parts.tasks.task_file import to_jsonl
from parts.tasks.task_model import TaskModel
from pipeline import runfile
from pipeline.scores import TaskResult

FEWEST = 20  # questions; the interval of fewer says nothing


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
            f"the held-out text gives {len(asked.questions)} questions for {next_line.NAME}, "
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
        name=next_line.NAME,
        metrics=choices.metrics(asked.questions, scores),
        chance=1 / next_line.CHOICES,
        documents=len(asked.questions),
        few_shot=0,
        sha256=hashlib.sha256(to_jsonl(asked.questions).encode()).hexdigest(),
        source="held-out text of the run",
    )
    return found, scores
