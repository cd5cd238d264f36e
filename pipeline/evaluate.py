"""Stage evaluate: the exported model's held-out loss, tasks and text sample -> data/evaluate.

What is measured is what was exported: the weights are read back from the Hugging Face folder.
Shapes in names: N sequences of T tokens, V vocabulary, P predictions.
"""

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import jax

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_json, write_text
from lockstep.programs.placement import device_groups
from lockstep.tables.explain import validate
from parts.tasks import next_line, task_model
from parts.tasks.run_file_tasks import RunFileTasks
from parts.workload import export_folder
from parts.workload.choice import row_spec
from parts.workload.description import FILE, Description
from parts.workload.worker import Worker
from pipeline import runfile
from pipeline.audit.verdict_text import HELD_OUT, SAMPLE, measured_on
from pipeline.language_model import held_out
from pipeline.language_model.draw import Sampling
from pipeline.language_model.held_out import HeldOutRows
from pipeline.language_model.text_writer import TextWriter
from pipeline.scores import TaskResult, flat, one_line, report
from pipeline.stage import devices, logs
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import OUT
from pipeline.tokens.shards import read_shards
from pipeline.tokens.tokenizer_files import encode
from pipeline.weights import hf
from pipeline.weights.exported import Exported, read

TASKS = "tasks"  # folder of what the tasks asked and found
NOTHING = dict.fromkeys(held_out.NUMBERS)


class Findings(NamedTuple):
    """What was found of an export; None where there is nothing.

    numbers: Of held-out text. tasks: Results of tasks. text: A text that the model wrote.
    workload: What a workload measured by itself.
    """

    numbers: dict[str, float | int | None] = NOTHING
    tasks: Sequence[TaskResult] = ()
    text: str | None = None
    workload: dict[str, Any] | None = None


def run(run: runfile.Run, paths: Paths) -> None:
    """Write evaluate.json, sample.txt and metrics/evaluate.json; what is unknown is null.

    What each task asked, and what the model answered, is in the folder tasks.
    """
    export = paths.need("export")
    paths.need("download")
    devices.keep_compiled(paths.store / "compiled")
    notes: list[str] = []
    with paths.building() as folder:
        if (export / hf.REFUSED).exists():
            found = Findings()
            notes.append("the export was refused, so there is nothing to measure")
        else:
            found = _evaluate(run, paths, folder, notes)
        _write(run, found, notes, folder)
    for name, said in HELD_OUT.items():
        if found.numbers[name] is not None:
            print(f"evaluate: {said} {found.numbers[name]:.4f}")
    if found.numbers["held_out_loss"] is not None:
        print(f"evaluate: on {measured_on(*(found.numbers[name] for name in SAMPLE))}")
    for task in found.tasks:
        print(f"evaluate: {one_line(task)}")
    for note in notes:
        logs.say(f"evaluate: {note}")


def _evaluate(run: runfile.Run, paths: Paths, folder: Path, notes: list[str]) -> Findings:
    export, shards = paths.out("export"), paths.out("download")
    if run.workload.factory:
        return _evaluate_workload(run, export, shards, notes)
    exported = read(export, scan=run.peers.scan_layers)
    tasks = _score(run, exported, paths, folder / TASKS, notes)  # first: one may be missing
    numbers = _measure(run, exported, held_out.read(run, shards), export, notes)
    return Findings(numbers, tasks, _sample(run, exported, notes))


def _write(run: runfile.Run, found: Findings, notes: list[str], folder: Path) -> None:
    told = {"tasks": [report(task) for task in found.tasks], "prompt": run.evaluate.prompt}
    told |= {"text": found.text, "notes": notes}
    of_workload = {} if found.workload is None else {"workload": found.workload}
    write_json(folder / "evaluate.json", found.numbers | told | of_workload)
    write_text(folder / "sample.txt", found.text or "")
    scores = {name: None for name in run.evaluate.tasks if name == next_line.NAME}
    scores |= {task.name: flat(task) for task in found.tasks}
    measured = found.numbers | {"tasks": scores} | of_workload
    write_json(folder / METRICS / "evaluate.json", measured)


# ---- Held-out text ----


def _measure(
    run: runfile.Run, exported: Exported, data: HeldOutRows, export: Path, notes: list[str]
) -> dict:
    """The numbers of metrics/evaluate.json."""
    if not len(data.rows_NW):
        notes.append("nothing is held out, so there is no loss to measure")
        return NOTHING
    if len(data.rows_NW) < (asked := run.held_out.sequences):
        found = len(data.rows_NW)
        notes.append(f"[held_out] sequences = {asked}, and there are {found} to measure")

    loss = held_out.exported_loss(
        exported.features, exported.head, exported.params, data, run.peers
    )
    found = held_out.numbers(loss, data, exported.tokenizer, notes)
    if not math.isfinite(found["perplexity"]):
        raise LockstepError(
            f"{export}: held-out loss is {loss}, expected a number; [export] dtype = "
            f"{run.export.dtype} may be too narrow for these weights"
        )
    return found


# ---- A model of the user's own ----


def _evaluate_workload(run: runfile.Run, export: Path, shards: Path, notes: list[str]) -> Findings:
    """Held-out loss of the exported params, by the workload; and what it measures by itself."""
    told = validate(Description, read_json(export / FILE), str(export / FILE))
    params = export_folder.read(export, told)
    notes.append("tasks and a text sample need a model of models/, so a workload has none")
    numbers, size = dict(NOTHING), run.peers.micro_batch
    with closing(Worker(run, row_spec(run, read_shards(shards)), told)) as worker:
        worker.shards = shards
        data = held_out.read(run, shards)
        if len(data.rows_NW) and worker.measures:
            loss = export_folder.held_out_loss(worker, params, data.rows_NW, size)
            numbers |= held_out.loss_numbers(loss, data)
        else:
            notes.append("nothing is held out, or the workload measures nothing: there is no loss")
        measured = {}
        if worker.evaluates:
            measured = worker.evaluate(params, "held_out")
    return Findings(numbers, workload=measured)


# ---- Tasks ----


def _score(
    run: runfile.Run, exported: Exported, paths: Paths, folder: Path, notes: list[str]
) -> list[TaskResult]:
    """The results of `[evaluate] tasks`; what was asked and answered goes to `folder`."""
    settings, export = run.evaluate, paths.out("export")
    if exported.tokenizer is None and settings.tasks == (next_line.NAME,):
        notes.append(f"there is no tokenizer.json, so {next_line.NAME} has no questions")
        return []
    groups = device_groups(jax.devices(), run.peers.fsdp)
    params_on = {group: group.put(exported.params) for group in groups}
    model = task_model.of_folder(exported, export, params_on, settings.batch_size)
    tasks = RunFileTasks(run, settings, model, paths.out("download"), paths.store, notes)
    return tasks.score(model, folder, f"{OUT['evaluate']}/{TASKS}")


# ---- The text sample ----


def _sample(run: runfile.Run, exported: Exported, notes: list[str]) -> str | None:
    """`[evaluate] prompt` and its continuation, or None without a tokenizer."""
    if exported.tokenizer is None:
        notes.append("there is no tokenizer.json, so there is no text sample")
        return None
    settings = run.evaluate
    ids = encode(exported.tokenizer, settings.prompt, "[evaluate] prompt")
    prompt = ids or [_beginning(exported)]
    group = device_groups(jax.devices(), run.peers.fsdp)[0]
    writer = TextWriter(
        exported,
        group.put(exported.params_to_write),
        context=min(exported.context, run.llm.max_seq_len),
        ends=exported.ends,
    )
    [continued] = writer.write(
        [prompt],
        max_new_tokens=settings.max_new_tokens,
        sampling=Sampling(settings.temperature),
        seeds=[settings.seed],
    )
    return exported.tokenizer.decode(prompt + continued, skip_special_tokens=True)


def _beginning(exported: Exported) -> int:
    if exported.beginning is None:
        raise LockstepError(
            "[evaluate] prompt is empty, expected text: the model's config.json has no bos_token_id"
        )
    return exported.beginning
