"""A gradient by the ways that XLA takes for its products: the first of each, or the quickest.

XLA tunes where operations need not be deterministic, and writes down what it chose. A deterministic
program that is given this file takes the same ways, if it finds all that it looks for there. Each
section is a process of its own, since what XLA chose for one program holds for the next one too.
"""

import argparse
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import jax

from benchmarks import model
from benchmarks.accelerator.extent import Extent, attempt, judged
from benchmarks.gpu import CHOICES, FRESH
from benchmarks.measuring import in_turns
from benchmarks.trial import Trial
from lockstep.files import read_json, write_json
from lockstep.transcript.trees import tree_hash


def untuned(extent: Extent, work: Path) -> Iterator[dict]:
    """As a run has it."""
    yield attempt({}, lambda: _measure("untuned", extent, work))


def tuned(extent: Extent, work: Path) -> Iterator[dict]:
    """Autotuned and not deterministic; the choices are left for the sections below."""

    def case() -> dict:
        line, fresh, choices = _measure("tuned", extent, work), work / FRESH, work / CHOICES
        if fresh.is_file() and not choices.exists():  # a program that was kept chooses nothing
            fresh.rename(choices)
        return line | _said_of(choices)

    yield attempt({}, case)


def reloaded(extent: Extent, work: Path) -> Iterator[dict]:
    """Deterministic, by these choices."""

    def case() -> dict:
        line, before = _measure("reloaded", extent, work), _read("untuned", work)
        gain = before and round(before["milliseconds"] / line["milliseconds"], 3)
        what = f"gradient, {line['size']}: by recorded choices, times as quick as untuned"
        return line | _said_of(work / CHOICES) | judged(what, gain, None, None)

    yield attempt({}, case)


def reloaded_again(extent: Extent, work: Path) -> Iterator[dict]:
    """The same in another process, which compiled for itself."""

    def case() -> dict:
        line, before = _measure("reloaded_again", extent, work), _read("reloaded", work)
        equal = before and before["hash"] == line["hash"]
        what = f"gradient, {line['size']}: the same bits by recorded choices in two processes"
        return line | judged(what, equal, True, equal)

    yield attempt({}, case)


def _measure(name: str, extent: Extent, work: Path) -> dict:
    """The hash and the milliseconds of the gradient; they are left for later sections."""
    case = extent.suspects[0]
    run = model.make_run(case.size, 1, argparse.Namespace(**case._asdict(), precision="bfloat16"))
    trial = Trial(run)
    found = tree_hash(jax.device_get(trial.gradients()))
    seconds = in_turns({"it": trial.gradient}, extent.repeats, warm=2)["it"]
    line = {"size": case.size, "milliseconds": round(1e3 * median(seconds), 3), "hash": found}
    (work / CHOICES).parent.mkdir(parents=True, exist_ok=True)
    write_json(_file(name, work), line)
    return line | {"xla_flags": os.environ["XLA_FLAGS"]}


def _read(name: str, work: Path) -> dict | None:
    return read_json(_file(name, work)) if _file(name, work).is_file() else None


def _file(name: str, work: Path) -> Path:
    return (work / CHOICES).parent / f"{name}.json"


def _said_of(choices: Path) -> dict:
    """How much was chosen; None where no XLA for a GPU wrote it."""
    data = choices.read_bytes() if choices.is_file() else None
    return {
        "choices": data and data.count(b"entries {"),
        "choices_bytes": data and len(data),
        "choices_sha256": data and hashlib.sha256(data).hexdigest(),
    }
