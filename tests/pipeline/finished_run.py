"""A finished run, made by hand in the formats of the stages: what the last stages read.

Nothing is trained; the numbers are chosen. Each folder is left as its stage leaves it, with its
made file, for a run file that differs from the default in a few values.
"""

import json
import math
import re
from pathlib import Path

import numpy as np

from lockstep.files import write_json, write_text
from lockstep.protocol.round import Decision, Message, Round
from lockstep.transcript import curves
from lockstep.transcript.entry import TABLES, Entry, Header
from lockstep.transcript.transcript import Transcript, Writer
from pipeline import runfile
from pipeline import scores as task_scores
from pipeline.audit.verdict import Verdict
from pipeline.audit.verdict_text import blame
from pipeline.language_model.held_out import NUMBERS
from pipeline.runfile.method import learning_rate_of_run
from pipeline.scores import Metric, TaskResult
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import PROJECT, RUN_FILE
from tests.lockstep.protocol import records

ROUNDS, EVERY, PEERS, BYTES = 40, 10, 4, 34_000
ERROR, ROWS = 0.125, (64, 640)  # of the held-out loss, and what it is measured on
PARAMETERS = 2_000_000
SHARDS = {
    "vocab_size": 4096,
    "columns": ["inputs"],
    "parts": [],
    "held_out_by_default": False,
    "files": [{"split": "train", "tokens": 1_000_000}, {"split": "held_out", "tokens": 50_000}],
    "source": {"read": "s3://me:secret@bucket/tokens?key=1", "sha256": "da7a" * 16},
}
LIAR = {
    "round": 12,
    "peer": 2,
    "kind": "message",
    "detail": "sent 0123, its replay gives <4567>",
    "applied": True,
    "bundle": "bundles/00011-00020-peer-02",
}
NEXT_LINE = TaskResult(
    "next_line",
    {"acc": Metric(0.31, 0.023), "acc_mutual_info": Metric(0.45, 0.025)},
    chance=0.25,
    documents=400,
    few_shot=0,
    sha256="5e" * 32,
    source="held-out text of the run",
)
CAUGHT = LIAR | {"kind": "commitment", "applied": False}  # in its round, and ejected
SCORED = "step\ttask\tmetric\tvalue\tlow\thigh\n"
SCORED += "0\tnext_line\tacc\t0.24\t0.2\t0.28\n40\tnext_line\tacc\t0.31\t0.27\t0.35\n"
CARD = "---\nlibrary_name: transformers\n---\n\n# A model\n\n## Verdict\n\nAccepted.\n"
TEXT = "def f(x):\n    return '<b>&\x1b[31m' + x\n"


def write_run_file(root: Path, **edits: str) -> Path:
    """The default run file, shorter, as compiled, unpinned; `edits` set further keys, by name."""
    text = (PROJECT / RUN_FILE).read_text()
    shorter = {"total_steps": str(ROUNDS), "snapshot_every": str(EVERY)}
    shorter |= {"bits": '"machine"', "product_bits": "20", "data": '""'}
    for key, value in (shorter | edits).items():
        text, count = re.subn(rf"(?m)^{key} = [^#\n]*", f"{key} = {value} ", text)
        assert count, f"{RUN_FILE} has no {key}"
    path = root / "run.toml"
    path.write_text(text)
    return path


def finish(
    root: Path,
    *,
    findings: tuple[dict, ...] = (),
    held_out: bool = True,
    text: str | None = TEXT,
    method: dict | None = None,
    edits: dict[str, str] | None = None,
) -> Path:
    """Leaves the folders of all stages but the report; returns the run file.

    Args:
      root: where `data/` is made.
      findings: of the witness; with one that was applied, the export is refused.
      held_out: whether there is a held-out split.
      text: what the model writes.
      method: takes the place of entries of the verdict.
      edits: further keys of the run file.
    """
    run_file = write_run_file(root, **edits or {})
    run = runfile.load(run_file)
    for stage in ("download", "convert"):
        with Paths(stage, run_file, root).building() as folder:
            write_json(folder / "shards.json", SHARDS)
    accepted = not any(finding["applied"] for finding in findings)
    _train(run, Paths("train", run_file, root), held_out)
    with Paths("witness", run_file, root).building() as folder:
        write_json(folder / "verdict.json", verdict(findings, **method or {}))
    with Paths("export", run_file, root).building() as folder:
        if accepted:
            write_text(folder / "model.safetensors", "weights")
            write_text(folder / "README.md", CARD)
        else:
            write_json(folder / "refused.json", {"why": blame(findings), "findings": findings})
    text = text if accepted else None
    _evaluate(run, Paths("evaluate", run_file, root), held_out and accepted, text)
    return run_file


def _loss(step: float) -> float:
    return 8.317 - 2.7 * (1 - math.exp(-step / 15))


def _train(run: runfile.Run, paths: Paths, held_out: bool) -> None:
    entries = [_entry(step, held_out) for step in range(1, ROUNDS + 1)]
    with paths.building() as folder:
        writer = Writer(folder / "transcript", run.snapshots())
        header = Header(
            key=paths.key,
            run=run.model_dump(mode="json", include=TABLES),
            model=run.llm.checkpoint.config,
            environment={"platform": "cpu", "threads": "4", "jax": "0.0"},
            bitwise=True,
            held_out_loss=_loss(0) if held_out else None,
            held_out_stderr=ERROR if held_out else None,
            held_out_rows=ROWS if held_out else None,
        )
        writer.header(header)
        for entry in entries:
            writer.round(entry, {peer: b"x" for peer in range(PEERS)})
        for step in run.snapshots().steps:
            write_json(folder / "transcript" / "snapshots" / f"{step:05}" / "state.json", {})
        rows = curves.rows(Transcript(folder / "transcript"))
        curves.write(rows, header, learning_rate_of_run(run), folder / METRICS)
        write_text(folder / METRICS / "tasks.tsv", SCORED if held_out else SCORED.split("\n")[0])
        write_metrics(folder)


def write_metrics(folder: Path, **others: object) -> None:
    """metrics/train.json of the transcript in a folder, as of a model of `PARAMETERS`."""
    transcript, params = Transcript(folder / "transcript"), [np.broadcast_to(0.0, PARAMETERS)]
    numbers = curves.metrics(curves.rows(transcript), transcript, params)
    write_json(folder / METRICS / "train.json", numbers | others)


def _entry(step: int, held_out: bool) -> Entry:
    late = (3,) if step == 5 else ()
    applied = tuple(peer for peer in range(PEERS) if peer not in late)
    noise = 0.03 * math.sin(7 * step)
    everybody = tuple(range(PEERS))
    spans = {peer: (0, 3) for peer in everybody}
    return records.entry(
        Round(step, 0, 7, 16 * (step - 1), 16, everybody, spans, (), (0,), ()),
        records.evidence(
            dict.fromkeys(everybody, Message("00" * 32, BYTES)),
            arrivals={peer: 0.5 + 0.1 * peer for peer in everybody},
        ),
        Decision(applied, late, (), {}, 1, 0.6, 3.0 + 1.6 * step),
        loss=_loss(step) + noise,
        held_out_loss=_loss(step) if held_out and step % EVERY == 0 else None,
        held_out_stderr=ERROR if held_out and step % EVERY == 0 else None,
    )


def verdict(findings: tuple[dict, ...] = (), **changes: object) -> dict:
    """verdict.json, as a witness that found these would have it."""
    replayed = [(0, 1, 10, 3), (1, 11, 20, 2), (2, 21, 30, 0), (3, 31, 40, 1)]
    ejected = {f["peer"]: f["round"] for f in findings if f["kind"] == "commitment"}
    said = {
        "accepted": not any(finding["applied"] for finding in findings),
        "policy": "applied",
        "not_comparable": None,
        "messages_kept": True,
        "clock": "simulated",
        "audited_rounds": ROUNDS,
        "empty_rounds": 0,
        "windows": ROUNDS // EVERY * PEERS,
        "replayed_windows": [
            {"window": window, "first": first, "last": last, "peer": peer}
            for window, first, last, peer in replayed
        ],
        "drawn_windows": len(replayed),
        "sample_seed": "5eed" * 16,
        "sample_seed_of": "transcript",
        "transcript": "5eed" * 16,
        "ejected": ejected,
        "dropped": {},
        "late": {3: 1},
        "findings": list(findings),
    }
    return Verdict.model_validate_json(json.dumps(said | changes)).model_dump(mode="json")


def _evaluate(run: runfile.Run, paths: Paths, measured: bool, text: str | None) -> None:
    values = (5.617, ERROR, 275.1, 2.312, *ROWS, 16_320, 57_200)
    values = values if measured else [None] * len(NUMBERS)
    result = dict(zip(NUMBERS, values, strict=True))
    result |= {"held_out_seen": 0.00123 if measured else None}
    result |= {"prompt": run.evaluate.prompt, "text": text}
    result["tasks"] = [task_scores.report(NEXT_LINE)] if measured and text else []
    result["notes"] = [] if measured else ["there is nothing to measure"]
    with paths.building() as folder:
        write_json(folder / "evaluate.json", result)
        write_text(folder / "sample.txt", result["text"] or "")
