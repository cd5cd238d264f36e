"""Stage evaluate: the exported model's held-out loss, tasks and text sample -> data/evaluate.

What is measured is what was exported: the weights are read back from the Hugging Face folder.
Shapes in names: N sequences of T tokens, V vocabulary, P predictions.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from tokenizers import Tokenizer

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.programs import held_out
from pipeline.programs.draw import Sampling
from pipeline.programs.generate import TextWriter
from pipeline.programs.held_out import HeldOutRows
from pipeline.programs.placement import device_groups
from pipeline.stage import artifacts, devices
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import OUT
from pipeline.tasks import next_line, task_model
from pipeline.tasks.run_file_tasks import RunFileTasks
from pipeline.tasks.scores import TaskResult, flat, one_line, report
from pipeline.tokens.columns import counted, split
from pipeline.tokens.tokenizer_files import encode
from pipeline.weights import hf
from pipeline.weights.exported import Exported, read

TASKS = "tasks"  # folder of what the tasks asked and found
UNKNOWN = -1  # bytes of a token that is not in the tokenizer
NAMES = ("held_out_loss", "perplexity", "bits_per_byte", "sequences", "tokens", "bytes")
NOTHING = dict.fromkeys(NAMES)


class Findings(NamedTuple):
    """Numbers of held-out text, results of tasks, and a text; None where there is none."""

    numbers: dict[str, float | int | None] = NOTHING
    tasks: Sequence[TaskResult] = ()
    text: str | None = None


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
    for name in NAMES[:3]:
        if found.numbers[name] is not None:
            print(f"evaluate: {name.replace('_', ' ')} {found.numbers[name]:.4f}")
    for task in found.tasks:
        print(f"evaluate: {one_line(task)}")
    for note in notes:
        print(f"evaluate: {note}")


def _evaluate(run: runfile.Run, paths: Paths, folder: Path, notes: list[str]) -> Findings:
    export, shards = paths.out("export"), paths.out("download")
    exported = read(export, scan=run.peers.scan_layers)
    tasks = _score(run, exported, paths, folder / TASKS, notes)  # first: one may be missing
    numbers = _measure(run, exported, held_out.read(run, shards), export, notes)
    return Findings(numbers, tasks, _sample(run, exported, notes))


def _write(run: runfile.Run, found: Findings, notes: list[str], folder: Path) -> None:
    told = {"tasks": [report(task) for task in found.tasks], "prompt": run.evaluate.prompt}
    told |= {"text": found.text, "notes": notes}
    artifacts.write_json(folder / "evaluate.json", found.numbers | told)
    artifacts.write_text(folder / "sample.txt", found.text or "")
    scores = {name: None for name in run.evaluate.tasks if name == next_line.NAME}
    scores |= {task.name: flat(task) for task in found.tasks}
    artifacts.write_json(folder / METRICS / "evaluate.json", found.numbers | {"tasks": scores})


# ---- Held-out text ----


def _measure(
    run: runfile.Run, exported: Exported, data: HeldOutRows, export: Path, notes: list[str]
) -> dict:
    """The numbers of metrics/evaluate.json; `tokens` and `bytes` are those that are predicted."""
    rows_NW, columns = data
    if not len(rows_NW):
        notes.append("nothing is held out, so there is no loss to measure")
        return NOTHING
    if len(rows_NW) < (asked := run.held_out.sequences):
        notes.append(f"[held_out] sequences = {asked}, and there are {len(rows_NW)} to measure")

    loss = held_out.exported_loss(
        exported.features, exported.head, exported.params, data, run.peers
    )
    perplexity = float(np.exp(loss))
    if not math.isfinite(perplexity):
        raise LockstepError(
            f"{export}: held-out loss is {loss}, expected a number; [export] dtype = "
            f"{run.export.dtype} may be too narrow for these weights"
        )
    rows = split(rows_NW, columns)
    labels_NT = rows.inputs if rows.labels is None else rows.labels
    labels_P = labels_NT[:, 1:][counted(rows_NW, columns)]
    size = bytes_of(labels_P, exported.tokenizer, notes)
    return {
        "held_out_loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": loss * labels_P.size / math.log(2) / size if size else None,
        "sequences": len(rows_NW),
        "tokens": labels_P.size,
        "bytes": size,
    }


def bytes_of(tokens_P: np.ndarray, tokenizer: Tokenizer | None, notes: list[str]) -> int | None:
    """Return the bytes of text that these tokens stand for, or None if that is unknown.

    In a byte-level vocabulary (GPT-2's, Llama 3's, Qwen's) a token is spelled with one character
    for each of its bytes. A special token, such as the end of a document, has no bytes of text, but
    its bits count in bits per byte.

    Args:
      tokens_P: The tokens that are predicted.
      tokenizer: Tokenizer of the model, if it has one.
      notes: Gains the reason if the bytes are unknown.
    """
    if tokenizer is None:
        notes.append("there is no tokenizer.json, so bits per byte are unknown")
        return None
    if "ByteLevel" not in _decoders(tokenizer):
        notes.append("the tokenizer is not byte-level, so bits per byte are unknown")
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    bytes_V = np.full(max(*vocabulary.values(), tokens_P.max()) + 1, UNKNOWN)
    for token, index in vocabulary.items():
        bytes_V[index] = len(token)
    for index, added in tokenizer.get_added_tokens_decoder().items():
        bytes_V[index] = 0 if added.special else len(added.content.encode())
    found_P = bytes_V[tokens_P]
    if (found_P == UNKNOWN).any():
        notes.append(
            f"token {tokens_P[found_P == UNKNOWN][0]} of the held-out split is not in the "
            "tokenizer, so bits per byte are unknown"
        )
        return None
    return int(found_P.sum())


def _decoders(tokenizer: Tokenizer) -> list[str]:
    """The kinds of the tokenizer's decoders, in order."""
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    chain = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [part["type"] for part in chain]


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
