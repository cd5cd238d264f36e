"""Stage evaluate: the exported model's held-out loss, tasks and text sample -> data/evaluate.

What is measured is what was exported: the weights are read back from the Hugging Face folder.
Shapes in names: N sequences of T tokens, V vocabulary, P predictions.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax

from lockstep.errors import LockstepError
from lockstep.files import write_json, write_text
from lockstep.programs.placement import device_groups
from pipeline import runfile
from pipeline.audit.verdict_text import HELD_OUT, SAMPLE, measured_on, seen_in_train
from pipeline.joints import Joint
from pipeline.language_model import held_out
from pipeline.language_model.held_out import HeldOutRows
from pipeline.language_model.sampling import Sampling
from pipeline.language_model.text_writer import TextWriter
from pipeline.scores import TaskResult, flat, one_line, report
from pipeline.stage import devices, logs
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import OUT
from pipeline.subject import OpenedExport, subject_of
from pipeline.tokens.shards import read_shards
from pipeline.tokens.tokenizer_files import encode
from pipeline.weights import hf
from pipeline.weights.exported import Exported

BY_DEFAULT = runfile.Evaluate.model_fields["tasks"].default  # null where there are no questions
TASKS_FOLDER = "tasks"  # folder of what the tasks asked and found
NOTHING_MEASURED = dict.fromkeys(held_out.NUMBERS)


class Measured(NamedTuple):
    """The results of evaluating an export; None where there is nothing to measure."""

    numbers: dict[str, float | int | None] = NOTHING_MEASURED  # of held-out text
    tasks: Sequence[TaskResult] = ()
    text: str | None = None  # that the model wrote
    own: dict[str, Any] | None = None  # what the subject's own code measured


def run(run: runfile.Run, paths: Paths) -> None:
    """Write evaluate.json, sample.txt and metrics/evaluate.json; what is unknown is null.

    Each task's requests and the model's answers are in the folder tasks.
    """
    export = paths.need("export")
    paths.need("download")
    devices.keep_compiled(paths.store / "compiled")
    notes: list[str] = []
    with paths.building() as folder:
        if (export / hf.REFUSED).exists():
            measured = Measured()
            notes.append("the export was refused, so there is nothing to measure")
        else:
            measured = _evaluate(run, paths, folder, notes)
        seen = read_shards(paths.out("download")).held_out_seen
        _write(run, measured, seen, notes, folder)
    unit = subject_of(run).loss_unit
    for name, label in (HELD_OUT | {"held_out_loss": f"held-out loss, {unit}"}).items():
        if measured.numbers[name] is not None:
            print(f"evaluate: {label} {measured.numbers[name]:.4f}")
    if measured.numbers["held_out_loss"] is not None:
        print(f"evaluate: on {measured_on(*(measured.numbers[name] for name in SAMPLE))}")
        print(f"evaluate: {seen_in_train(seen)}")
    for task in measured.tasks:
        print(f"evaluate: {one_line(task)}")
    for note in notes:
        logs.say(f"evaluate: {note}")


def _evaluate(run: runfile.Run, paths: Paths, folder: Path, notes: list[str]) -> Measured:
    export, shards, subject = paths.out("export"), paths.out("download"), subject_of(run)
    model = subject.read_model(run, export / subject.exports.model_file, read_shards(shards))
    with closing(subject.exports.open_export(run, model, export, shards)) as opened:
        tasks: list[TaskResult] = []
        if opened.texts is None:
            notes.append("tasks and a text sample need a language model, so there are none")
        else:  # first: a package or data of a task may be missing
            tasks = _score(run, opened.texts, paths, folder / TASKS_FOLDER, notes)
        numbers = _measure(run, opened, held_out.read(run, shards), notes)
        text = None if opened.texts is None else text_sample(run, opened.texts, notes)
        return Measured(numbers, tasks, text, opened.own_metrics())


def _write(
    run: runfile.Run, measured: Measured, seen: float | None, notes: list[str], folder: Path
) -> None:
    details: dict[str, Any] = {"held_out_seen": seen}  # as shards.json has it
    details |= {"tasks": [report(task) for task in measured.tasks], "prompt": run.evaluate.prompt}
    details |= {"text": measured.text, "notes": notes}
    own = {} if measured.own is None else {"workload": measured.own}
    write_json(folder / "evaluate.json", measured.numbers | details | own)
    write_text(folder / "sample.txt", measured.text or "")
    scores = {name: None for name in run.evaluate.tasks if name in BY_DEFAULT}
    scores |= {task.name: flat(task) for task in measured.tasks}
    metrics = measured.numbers | {"tasks": scores} | own
    write_json(folder / METRICS / "evaluate.json", metrics)


# ---- Held-out rows ----


def _measure(run: runfile.Run, opened: OpenedExport, data: HeldOutRows, notes: list[str]) -> dict:
    """Return the numbers of metrics/evaluate.json."""
    if not len(data.rows_NW):
        notes.append("nothing is held out, so there is no loss to measure")
        return NOTHING_MEASURED
    if len(data.rows_NW) < (sequences := run.held_out.sequences):
        notes.append(
            f"[held_out] sequences = {sequences}, and there are {len(data.rows_NW)} to measure"
        )
    if (loss := opened.held_out_loss(data)) is None:
        notes.append("what was trained measures no rows, so there is no loss")
        return NOTHING_MEASURED
    return opened.numbers(loss, data, notes)


# ---- Tasks ----


class OffersTasks(Protocol):
    """Tasks to evaluate an export on."""

    def score_export(
        self,
        run: runfile.Run,
        exported: Exported,
        paths: Paths,
        folder: Path,
        path: str,
        notes: list[str],
    ) -> list[TaskResult]:
        """Return the results of `[evaluate] tasks`; `folder`, which `path` calls, gets answers."""


SCORERS = Joint[OffersTasks]("run_file_tasks")


def _score(
    run: runfile.Run, exported: Exported, paths: Paths, folder: Path, notes: list[str]
) -> list[TaskResult]:
    """Return the results of `[evaluate] tasks`; requests and answers go to `folder`."""
    for part in SCORERS:
        path = f"{OUT['evaluate']}/{TASKS_FOLDER}"  # the path of `folder`, as its files name it
        return part.score_export(run, exported, paths, folder, path, notes)
    if others := [name for name in run.evaluate.tasks if name not in BY_DEFAULT]:
        raise LockstepError(f"[evaluate] tasks = {others}, expected []: parts/tasks is not here")
    notes.append("parts/tasks is not here, so no task is asked")
    return []


# ---- The text sample ----


def text_sample(run: runfile.Run, exported: Exported, notes: list[str]) -> str | None:
    """Return `[evaluate] prompt` and its continuation, or None and a note that says why not."""
    if exported.tokenizer is None:
        notes.append("there is no tokenizer.json, so there is no text sample")
        return None
    settings = run.evaluate
    try:
        prompt = encode(exported.tokenizer, settings.prompt, "[evaluate] prompt")
    except LockstepError as error:
        notes.append(f"{error}: no text sample")
        return None
    if not prompt:
        if exported.beginning is None:
            notes.append("[evaluate] prompt is empty and no token begins a text: no text sample")
            return None
        prompt = [exported.beginning]
    if undone := exported.texts.not_done(drawn=settings.temperature > 0):
        notes.append(f"the text sample goes without {undone}, which the export's files say")
    group = device_groups(jax.devices(), run.peers.fsdp)[0]
    writer = TextWriter(
        exported,
        group.put(exported.params_to_write),
        context=min(exported.context, run.llm.max_seq_len),
        ends=exported.ends,
    )
    [continuation] = writer.write(
        [prompt],
        max_new_tokens=settings.max_new_tokens,
        sampling=Sampling(settings.temperature),
        seeds=[settings.seed],
    )
    return exported.tokenizer.decode(prompt + continuation, skip_special_tokens=True)
