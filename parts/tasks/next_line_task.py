"""The task next_line of a run: asked of a model, and written as files for others.

`lm_eval --model hf --model_args pretrained=data/export --tasks data/evaluate/tasks/next_line.yaml`
asks the same questions of the same model.

The likeliest choice counts, as in lm-evaluation-harness. acc_mutual_info: the choice of the highest
gain by the context, log p(choice | context) - log p(choice), so that a common one has no advantage.
acc: of the highest log-likelihood after the context. acc_bytes: of the highest per byte of the
choice, so that a long one has a chance. The first is the main one: by the others, a small model
chooses what is common, whatever the context.

Shapes in names: N questions of C choices.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import yaml

from lockstep.files import write_text
from lockstep.programs.columns import PLAIN
from parts.tasks import next_line, two_parts
from parts.tasks.next_line import NAME, Question
from parts.tasks.task_model import LikelihoodRequest, TaskModel
from pipeline import runfile
from pipeline.language_model import held_out
from pipeline.scores import Metric, TaskResult
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards
from pipeline.tokens.tokenizer_files import library_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FEWEST_QUESTIONS = 20  # questions; the interval of fewer says nothing
QUESTIONS, DEFINITION, SCORES = f"{NAME}.jsonl", f"{NAME}.yaml", f"{NAME}.scores.jsonl"
MOST_TOKENS = 2**19  # that are read
STRETCH_SEQUENCES = 16  # sequences that are read together, so that lines have lines before them
TRIED_QUESTIONS = 8  # questions that are tried for each that is asked


# ---- The held-out text ----


def documents(run: runfile.Run, shards: Path, tokenizer: "Tokenizer") -> Iterator[str]:
    """Yield next_line's documents of the held-out split; one in several files, in parts.

    A split of more than `MOST_TOKENS` tokens is read in stretches that the run's seed spreads out.
    It has no documents where nothing is held out, or where rows are not tokens or have columns
    beside their tokens: such rows hold conversations or packed texts, whose lines do not follow one
    another. A special token of the tokenizer ends a document; `shards` is the folder that the stage
    download left.
    """
    listing, length = read_shards(shards), run.llm.max_seq_len
    if not run.held_out.sequences or listing.columns != PLAIN or listing.rows is not None:
        return
    data = Sequences(shards, listing, "held_out", length, run.runtime)
    added = tokenizer.get_added_tokens_decoder()
    special = [token for token, info in added.items() if info.special]
    for indices_N in _stretches(data, length, run.peers.seed):
        tokens_N = data.take(indices_N).ravel()
        for document_N in np.split(tokens_N, np.flatnonzero(np.isin(tokens_N, special))):
            yield tokenizer.decode(document_N.tolist(), skip_special_tokens=True)


def _stretches(data: Sequences, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the sequences that next_line reads, those that follow one another together."""
    count, most = len(data), MOST_TOKENS // length
    stretch_M = held_out.spread(-(-count // STRETCH_SEQUENCES), -(-most // STRETCH_SEQUENCES), seed)
    index_N = (stretch_M[:, None] * STRETCH_SEQUENCES + np.arange(STRETCH_SEQUENCES)).ravel()
    index_N = index_N[index_N < count]
    ends_F = np.cumsum([file.tokens // length for file in data.files])
    file_N = np.searchsorted(ends_F, index_N, side="right")
    breaks_N = (np.diff(index_N) > 1) | (np.diff(file_N) > 0)
    yield from np.split(index_N, np.flatnonzero(breaks_N) + 1)


# ---- Questions and scores ----


class Scores(NamedTuple):
    """Log-likelihoods of next_line's choices, [N, C]: after a question's context, and alone."""

    after_NC: np.ndarray
    alone_NC: np.ndarray


class AskedQuestions(NamedTuple):
    """next_line's questions as requests: C of each after its context, then C choices alone."""

    questions: list[Question]
    requests: list[LikelihoodRequest]


def ask(questions: Iterable[Question], model: TaskModel, count: int) -> AskedQuestions:
    """Return the requests of next_line's first `count` questions whose choices fit a model.

    At most `TRIED_QUESTIONS` times as many questions are looked at.
    """
    selection = AskedQuestions([], [])
    encode = partial(two_parts.encode, model.tokenizer, model.beginning)
    for question in islice(questions, TRIED_QUESTIONS * count):
        with library_errors("next_line: expected a tokenizer that encodes any line"):
            parts = partial(two_parts.in_two_parts, encode, model.beginning)
            requests: list[LikelihoodRequest] = [
                pair
                for context in (question.context, "")
                for pair in parts(context, question.choices)
            ]
        if all(0 < len(continuation) <= model.context for _, continuation in requests):
            selection.questions.append(question)
            selection.requests.extend(requests)
        if len(selection.questions) == count:
            break
    return selection


def metrics(questions: Sequence[Question], scores: Scores) -> dict[str, Metric]:
    """Return the shares of right answers in next_line, and standard errors by documents."""
    bytes_NC = np.array([[len(c.encode()) for c in q.choices] for q in questions])
    answers_N = np.array([question.answer for question in questions])
    documents_N = np.array([question.document for question in questions])
    chosen = {
        "acc_mutual_info": scores.after_NC - scores.alone_NC,
        "acc": scores.after_NC,
        "acc_bytes": scores.after_NC / bytes_NC,
    }
    shares = {}
    for name, x_NC in chosen.items():
        right_N = x_NC.argmax(axis=1) == answers_N
        shares[name] = Metric(*held_out.mean_of(right_N, documents_N=documents_N))
    return shares


# ---- The task of a run ----


def prepare(
    run: runfile.Run, shards: Path, model: TaskModel, count: int, notes: list[str]
) -> AskedQuestions | None:
    """Return the next_line questions of a run's held-out text for a model; None if too few.

    There are `count` at most; `notes` gains the reason if there are none. `shards` is the folder
    that the stage download left.
    """
    selection = ask(next_line.questions(documents(run, shards, model.tokenizer)), model, count)
    if len(selection.questions) < FEWEST_QUESTIONS:
        notes.append(
            f"the held-out text gives {len(selection.questions)} questions for {NAME}, "
            f"expected at least {FEWEST_QUESTIONS} lines in one column that fit into the model"
        )
        return None
    return selection


def result(
    selection: AskedQuestions, model: TaskModel, advance: Callable[[int], None] = lambda _: None
) -> tuple[TaskResult, Scores]:
    """Ask next_line's questions, and return the result and each choice's scores.

    `advance` is called with the number of requests that have been scored since the last call.
    """
    answers = model.log_likelihoods(selection.requests, advance)
    logs_N2C = np.reshape([x.log_likelihood for x in answers], (len(selection.questions), 2, -1))
    scores = Scores(logs_N2C[:, 0], logs_N2C[:, 1])
    task_result = TaskResult(
        name=NAME,
        metrics=metrics(selection.questions, scores),
        chance=1 / next_line.CHOICES,
        documents=len(selection.questions),
        few_shot=0,
        sha256=hashlib.sha256(to_jsonl(selection.questions).encode()).hexdigest(),
        source="held-out text of the run",
    )
    return task_result, scores


def to_jsonl(questions: Iterable[Question]) -> str:
    """Return next_line's questions as JSON lines: context, choices, the answer's number, from 0."""
    return "".join(_line(question._asdict()) for question in questions)


def write(folder: Path, path: str, selection: AskedQuestions, scores: Scores) -> None:
    """Write next_line.jsonl, next_line.yaml and next_line.scores.jsonl to a folder.

    The definition names the folder by its `path` from where lm_eval runs.
    """
    definition = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{path}/{QUESTIONS}"}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": "",  # a choice begins with its line break
        "metric_list": [{"metric": name} for name in ("acc_mutual_info", "acc", "acc_bytes")],
        "metadata": {"version": 1},
    }
    write_text(folder / QUESTIONS, to_jsonl(selection.questions))
    write_text(folder / DEFINITION, yaml.safe_dump(definition, sort_keys=False))
    lines = (
        {"question": number, "answer": question.answer, "after": after, "alone": alone}
        for number, (question, after, alone) in enumerate(
            zip(
                selection.questions, scores.after_NC.tolist(), scores.alone_NC.tolist(), strict=True
            )
        )
    )
    write_text(folder / SCORES, "".join(map(_line, lines)))


def _line(value: dict) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
