"""Runs on Preprocessed data, from parquet files to a verdict that anybody can repeat."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.programs.columns import Columns
from lockstep.transcript.trees import load_nested, save_tree
from pipeline.audit import bundle
from tests import tiny
from tests.errors import refused

pytestmark = pytest.mark.long

STAGES = ("download", "convert", "train", "witness", "export", "evaluate")
ROW = 16
FLIP = {"kind": "sign_flip", "peer": 1, "rounds": [2, 3]}
OTHERWISE = {"kind": "wrong_precision", "peer": 0, "rounds": [5, 5]}  # by programs of its own


def make(folder: Path, data: Path, *stages: str, **changes: object) -> Path:
    """Runs stages here; the folder of their results."""
    run_file, root = folder / "run.toml", folder / "root"
    folder.mkdir(exist_ok=True)
    tiny.write_run(run_file, tiny.run_document(data, **changes))
    tiny.make(run_file, root, *stages)
    return root / "data"


def put(folder: Path, split: str, inputs: np.ndarray, **columns: list | np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    table = {"inputs": list(inputs)} | {name: list(lists) for name, lists in columns.items()}
    parquet.write_table(pa.table(table), folder / f"{split}-00000-of-00001.parquet")


def rows_of(path: Path) -> np.ndarray:
    tokens = np.fromfile(path, "<u2").astype(np.int64)
    return tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW)


def losses(data: Path) -> list[list[float]]:
    """The loss of each round, and where it was measured that of the held-out rows."""
    lines = (data / "trained/transcript/rounds.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    return [[entry["loss"], entry["held_out_loss"] or 0.0] for entry in entries]


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> tuple[Path, dict]:
    """Rows of two sequences each and padding, of which the answers count; and what names them."""
    folder = tmp_path_factory.mktemp("packed")
    plain = tiny.write_data(folder / "tokens")
    for split, file in (("train", "a.ds"), ("val", "held_out/a.ds")):
        inputs = rows_of(plain / file)[:40]
        inputs[:, 14:] = 0
        labels = inputs.copy()
        labels[:, [0, 1, 2, 9, 10, 14, 15]] = -100
        put(
            folder / "rows",
            split,
            inputs,
            labels=labels,
            position_ids=np.tile([*range(9), *range(5), 0, 1], (len(inputs), 1)),
            sequence_lengths=[[9, 5]] * len(inputs),
        )
    return plain, {
        "model__LLM__data_location": {"Preprocessed": str(folder / "rows")},
        "model__LLM__data_type": "Finetuning",
    }


def test_a_liar_among_packed_rows_is_found_again_with_the_bundle_alone(
    packed, tmp_path, capsys, monkeypatch
):
    plain, named = packed
    data = make(tmp_path, plain, *STAGES, faults__schedule=[FLIP, OTHERWISE], **named)
    verdict = read_json(data / "verdict/verdict.json")
    finding, other = verdict["findings"]
    assert (finding["peer"], finding["kind"], verdict["method"]) == (1, "message", "bitwise")
    assert (other["peer"], other["round"]) == (0, 5)
    assert (data / "export/refused.json").exists()

    folder, later = tmp_path / "bundle", tmp_path / "later"
    shutil.copytree(data / "verdict" / finding["bundle"], folder)
    shutil.copytree(data / "verdict" / other["bundle"], later)
    for gone in (tmp_path / "root", tmp_path / "run.toml"):
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    tensors = load_nested(folder / "tokens.safetensors")
    assert {name: x.shape for name, x in tensors.items()} == {"indices": (6,), "rows": (6, 4 * ROW)}
    rows = dict(zip(Columns._fields, np.split(tensors["rows"], 4, axis=1), strict=True))
    assert (rows["labels"] == -100).sum() == 6 * 7
    assert bundle.show(folder, 1) == bundle.show(later, 1) == 0
    confirmed = "1 of 1 findings confirmed, compared bit for bit"
    assert capsys.readouterr().out.count(confirmed) == 2
    # of the first window the later bundle has the rounds, which the audit recomputes, and no more
    assert len((later / "transcript/rounds.jsonl").read_text().splitlines()) == 6
    assert [path.name for path in (later / "transcript/payloads").iterdir()] == ["00004.bin"]

    # labels of one's own are another batch, and what cannot be in a row is refused
    def change(**columns: np.ndarray) -> None:
        changed = tensors | {"rows": np.concatenate([*(rows | columns).values()], axis=1)}
        save_tree(folder / "tokens.safetensors", changed)
        manifest = read_json(folder / bundle.MANIFEST) | {"files": bundle.listing(folder)}
        (folder / bundle.MANIFEST).write_text(json.dumps(manifest))

    change(labels=np.maximum(rows["labels"], 0))
    assert bundle.show(folder, 1) == 1
    for name, column, message in (
        ("labels", rows["labels"] - 1, "expected labels from 0 and below 64"),
        ("position_ids", rows["position_ids"] + 9, "expected position_ids from 0 and below 16"),
        ("sequence_ids", rows["sequence_ids"] - 1, "expected sequence_ids from 0 and below 17"),
        ("labels", rows["labels"][:, 1:], "for each a row of 64 numbers"),
        ("others", rows["labels"], "for each a row of 64 numbers"),
    ):
        change(**{name: column})
        with pytest.raises(LockstepError, match=f"tokens.safetensors: .*{message}"):
            bundle.show(folder, 1)


def test_an_honest_run_on_packed_rows_is_accepted_and_measured(packed, tmp_path):
    plain, named = packed
    data = make(tmp_path, plain, *STAGES, **named)
    assert read_json(data / "verdict/verdict.json")["accepted"]
    found = losses(data)
    assert found[0][0] > found[-1][0]
    numbers = read_json(data / "evaluate/evaluate.json")
    assert (numbers["sequences"], numbers["tokens"]) == (4, 4 * 9)
    assert numbers["held_out_loss"] == pytest.approx(found[-1][1], abs=1e-4)


def test_rows_of_another_length_than_the_runs_are_refused(packed, tmp_path):
    plain, named = packed
    make(tmp_path, plain, "download", "convert", model__LLM__max_seq_len=8, **named)
    with refused("model.LLM.max_seq_len", 8, 16):
        make(tmp_path, plain, "train", model__LLM__max_seq_len=8, **named)


def test_labels_are_needed_to_fine_tune(tmp_path):
    plain = tiny.write_data(tmp_path / "tokens")
    put(tmp_path / "rows", "train", rows_of(plain / "a.ds")[:40])
    changes = {
        "model__LLM__data_location": {"Preprocessed": str(tmp_path / "rows")},
        "model__LLM__data_type": "Finetuning",
    }
    make(tmp_path, plain, "download", "convert", **changes)
    with refused("data_type", "Finetuning"):
        make(tmp_path, plain, "train", **changes)


def test_a_label_beyond_the_models_vocabulary_is_refused_before_training(tmp_path):
    plain = tiny.write_data(tmp_path / "tokens")
    inputs = rows_of(plain / "a.ds")[:40]
    labels = inputs.copy()
    labels[7, 3] = tiny.VOCABULARY
    put(tmp_path / "rows", "train", inputs, labels=labels)
    changes = {"model__LLM__data_location": {"Preprocessed": str(tmp_path / "rows")}}
    make(tmp_path, plain, "download", "convert", **changes)
    with refused("label 64"):
        make(tmp_path, plain, "train", **changes)
