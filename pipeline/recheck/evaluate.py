"""Stage evaluate again: held-out text is measured and, if the reader asks for it, tasks."""

import math
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import read_json
from lockstep.programs.columns import counted
from lockstep.programs.permutation import MOST_INDICES
from lockstep.tables.table import Count, NotNegative, Table
from lockstep.tables.validation import validate_json
from pipeline.audit import rows_file
from pipeline.audit.verdict_text import measured_on
from pipeline.joints import Joint
from pipeline.language_model import held_out
from pipeline.language_model.held_out import HeldOutRows, MeanLoss
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.outputs import EVALUATED, HEADER, HELD_OUT, RESULTS
from pipeline.recheck.published import PublishedRun
from pipeline.runfile import Run

LOSS_TOLERANCE = 1e-3  # nats: rounding of another machine
LOSS_ROUNDING = 1e-6  # of numbers that follow from the loss, relative
SCORE_TOLERANCE = 0.01  # of another machine: a document in a hundred may get another answer


class RepeatsScores(Protocol):
    """Tasks whose published scores can be computed again."""

    def score_again(
        self, run: Run, folder: Path, names: Collection[str], shards: Path | None, store: Path
    ) -> dict[str, dict[str, float | None]]:
        """Return scores by task, as evaluate.json has them."""


TASKS = Joint[RepeatsScores]("run_file_tasks")


class Evaluated(Table):
    """evaluate.json: numbers of the held-out text, null where nothing is held out, and scores."""

    held_out_loss: NotNegative | None
    """Nats per token."""
    held_out_stderr: NotNegative | None
    """Its standard error, nats; null of a single sequence."""
    perplexity: NotNegative | None
    """e to the power of the loss."""
    bits_per_byte: NotNegative | None
    """Bits per byte of text; null where the bytes are unknown."""
    sequences: Count | None
    """Held-out sequences that are measured."""
    split_sequences: Annotated[Count, Field(le=MOST_INDICES)] | None
    """Sequences of the whole held-out split, of which these are drawn."""
    tokens: Count | None
    """Tokens that are predicted in them."""
    bytes: Count | None
    """Bytes of text that these stand for."""
    tasks: dict[str, dict[str, float | None] | None]
    """Scores of tasks by their names: acc, acc_stderr and so on."""
    workload: dict[str, bool | int | float | str] | None = None
    """What a workload measured by itself; null of a model of models/."""

    @property
    def held_out(self) -> dict[str, float | int | None]:
        """The published numbers of the held-out text."""
        return self.model_dump(exclude={"tasks", "workload"})

    @property
    def scored(self) -> dict[str, dict[str, float | None]]:
        """Scores in evaluate.json of those tasks that have any."""
        return {name: scores for name, scores in self.tasks.items() if scores is not None}


def read(published: PublishedRun) -> Evaluated:
    """Read evaluate.json of a publication."""
    content = (published.folder / EVALUATED).read_bytes()
    return validate_json(Evaluated, content, EVALUATED)


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Measure again what evaluate.json says; what nobody measures again is stated."""
    record = read(published)
    if published.same_release:
        _compare_files(read_json(published.folder / RESULTS), record)
    return [*_measured(published, record), *_scores(published, record), *_stated(record)]


def _stated(record: Evaluated) -> list[PublicClaim]:
    claims = []
    if scored := [*record.scored]:
        text = f"the scores of {' and '.join(map(brief, scored))}"
        claims.append(PublicClaim("tasks", "stated", text, {"names": scored}))
    if names := sorted(record.workload or ()):
        text = f"{', '.join(map(brief, names))} of the workload"
        claims.append(PublicClaim("workload", "stated", text, {"names": names}))
    if (size := record.split_sequences) is not None:
        text = f"that the held-out split has {size:,} sequences"
        claims.append(PublicClaim("held_out_split", "stated", text, {"sequences": size}))
    return claims


def _compare_files(other: dict[str, Any], record: Evaluated) -> None:
    """Check that stage evaluate's two files have the same numbers."""
    numbers = {name: other.get(name) for name in record.held_out}
    tasks: dict[str, dict[str, Any]] = {}
    with expecting(RESULTS, "scores of tasks", AttributeError, KeyError, TypeError):
        for task in other["tasks"]:
            for name, metric in task["metrics"].items():
                scores = tasks.setdefault(task["name"], {})
                scores |= {name: metric["value"], f"{name}_stderr": metric["stderr"]}
    if (numbers, tasks, other.get("workload")) != (record.held_out, record.scored, record.workload):
        raise LockstepError(
            f"{RESULTS}: the numbers differ from those in {EVALUATED}, expected the same numbers"
        )


# ---- Held-out text ----


def _measured(published: PublishedRun, record: Evaluated) -> list[PublicClaim]:
    """Measure held-out text again; claim nothing where nothing was held out."""
    run, model, header = published.run, published.setup.model, published.transcript.header
    if header.held_out_loss is None:
        for name, value in record.held_out.items():
            if value is not None:
                raise LockstepError(
                    f"{EVALUATED}: {name} is {value}, expected null, since nothing was held out in "
                    "training"
                )
        return []
    data = _held_out_rows(published, record.split_sequences)
    count, split = len(data.rows_NW), data.split_size
    if header.held_out_rows != (count, split):
        raise LockstepError(
            f"{EVALUATED}: {count} of {split} sequences, expected {header.held_out_rows} as in the "
            "transcript's header"
        )
    with closing(
        published.setup.subject.exports.open_export(run, model, published.folder)
    ) as opened:
        loss = opened.held_out_loss(data)
        if loss is None:
            raise LockstepError(
                f"{HEADER}: held_out_loss is a number, expected null: no loss can be measured here"
            )
        stated = MeanLoss(record.held_out_loss, record.held_out_stderr)
        here = {"held_out_loss": loss.mean, "held_out_stderr": loss.stderr}
        _compare_numbers(record, here, abs_tol=LOSS_TOLERANCE)
        due = dict.fromkeys(held_out.NUMBERS) | opened.numbers(stated, data, [])
        _compare_numbers(record, due, rel_tol=LOSS_ROUNDING)
    different = len(np.unique(data.rows_NW, axis=0))
    return [held_out_claim(*loss, count, different, run.held_out.sequences, split)]


def held_out_claim(
    loss: float, stderr: float | None, sequences: int, different: int, requested: int, split: int
) -> PublicClaim:
    """Return the claim about a loss: on how many sequences it was measured, and of how many.

    `different` of them differ; `requested` of the whole `split` are what the run file asks for.
    """
    text = f"held-out loss {loss:.4f} measured again on {measured_on(stderr, sequences, split)}"
    if sequences < min(requested, split):
        text += f", of the {requested} asked for"
    if different < sequences:
        text += f", of which only {different} differ"
    values = {"loss": loss, "stderr": stderr, "sequences": sequences, "different": different}
    values |= {"asked": requested, "split_sequences": split}
    return PublicClaim("held_out", "proven", text, values)


def _held_out_rows(published: PublishedRun, split_size: int | None) -> HeldOutRows:
    """Return the published rows: those that the seed draws from a split of the size as stated.

    Where rows have labels, those in which nothing counts are missing, and so may be others.
    """
    if HELD_OUT not in published.files:
        raise LockstepError(f"{HELD_OUT}: no such file, expected the held-out sequences")
    run, columns = published.run, published.setup.programs.task.columns
    bound = published.setup.subject.vocab_size(published.setup.model)
    rows = rows_file.read(published.folder / HELD_OUT, columns, run, bound)
    if split_size is None:
        raise LockstepError(f"{EVALUATED}: split_sequences is null, expected a number")
    due_N = held_out.drawn(split_size, run)
    missing = len(np.setdiff1d(due_N, rows.indices_N))
    other = len(np.setdiff1d(rows.indices_N, due_N))
    if other or (missing and "labels" not in columns):
        raise LockstepError(
            f"{HELD_OUT}: lacks {missing} sequences and has {other} that are not due, expected the "
            f"{len(due_N)} of {split_size} that the run's seed draws"
        )
    data = HeldOutRows(rows.rows_NW, columns, rows.indices_N, split_size)
    if bound is not None and not counted(data.rows_NW, columns).any(axis=1).all():
        raise LockstepError(
            f"{HELD_OUT}: has a sequence in which nothing is predicted, expected none"
        )
    return data


def _is_near(a: float | None, b: float | None, rel_tol: float, abs_tol: float) -> bool:
    """Return whether a published and a measured number are within a tolerance, or both None."""
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=rel_tol, abs_tol=abs_tol)


def _compare_numbers(
    record: Evaluated, due: dict[str, float | None], *, rel_tol: float = 0, abs_tol: float = 0
) -> None:
    """Compare numbers of evaluate.json with those that are due, within a tolerance."""
    for name, measured in due.items():
        if not _is_near(author := getattr(record, name), measured, rel_tol, abs_tol):
            found, expected = (
                "null" if x is None else f"{x:.4f}" if isinstance(x, float) else str(x)
                for x in (author, measured)
            )
            raise LockstepError(
                f"{EVALUATED}: {name} is {found}, expected {expected} as measured here"
            )


# ---- Tasks ----


def _scores(published: PublishedRun, record: Evaluated) -> list[PublicClaim]:
    """Score the tasks of evaluate.json again if the reader asks; say so where none was scored.

    A part that scores tasks offers the joint "run_file_tasks": `score_again(run, folder, names,
    shards, store)` returns the scores of a published run's tasks by name, as evaluate.json has
    them. A stranger's definitions are not read, and no code of theirs is run.
    """
    if not published.own.tasks:
        return []
    if not record.scored:
        return [PublicClaim("tasks", "stated", "that no task was scored", {"names": []})]
    own, scores = published.own, {}
    for part in TASKS:
        scores |= part.score_again(
            published.run, published.folder, [*record.scored], own.shards, own.store
        )
    compare_scores(record.scored, scores)
    names = " and ".join(map(brief, sorted(record.scored)))
    return [PublicClaim("tasks", "proven", f"the scores of {names} repeated", {"scores": scores})]


def compare_scores(
    recorded: dict[str, dict[str, float | None]], measured: dict[str, dict[str, float | None]]
) -> None:
    """Compare the published scores of evaluate.json with those computed here."""
    for task in sorted(recorded.keys() | measured.keys()):
        if recorded.get(task, {}).keys() != measured.get(task, {}).keys():
            here, there = (sorted(scores.get(task, {})) for scores in (measured, recorded))
            raise LockstepError(
                f"{EVALUATED}: has the scores {brief(str(there))} for {brief(task)}, expected "
                f"{here}"
            )
        for metric, value in measured[task].items():
            claimed = recorded[task][metric]
            if not _is_near(value, claimed, SCORE_TOLERANCE, SCORE_TOLERANCE):
                raise LockstepError(
                    f"{EVALUATED}: {brief(metric)} of {brief(task)} is {claimed}, expected "
                    f"{value} as scored here"
                )
