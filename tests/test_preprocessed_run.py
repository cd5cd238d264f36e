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
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import load_nested, save_tree
from pipeline.audit import bundle
from tests import tiny

pytestmark = pytest.mark.long

STAGES = ("download", "convert", "train", "witness", "export", "evaluate")
ROW = 16
FLIP = {"kind": "sign_flip", "peer": 1, "rounds": [2, 3]}
OTHERWISE = {"kind": "wrong_precision", "peer": 0, "rounds": [5, 5]}  # by programs of its own


def make(folder: Path, **changes: object) -> Path:
    """Run the stages up to the evaluation; return the folder of their results."""
    run_file, root = tiny.start(folder, **changes)
    tiny.make(run_file, root, *STAGES)
    return root / "data"


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> dict:
    """Rows of two sequences each and padding, of which the answers count; and what names them."""
    folder = tmp_path_factory.mktemp("packed")
    plain = tiny.write_data(folder / "tokens")
    for split, file in (("train", "a.ds"), ("val", "held_out/a.ds")):
        tokens = np.fromfile(plain / file, "<u2").astype(np.int64)[: 40 * ROW]
        inputs = tokens[: len(tokens) // ROW * ROW].reshape(-1, ROW)
        inputs[:, 14:] = 0
        labels = inputs.copy()
        labels[:, [0, 1, 2, 9, 10, 14, 15]] = -100
        rows = {
            "inputs": list(inputs),
            "labels": list(labels),
            "position_ids": [[*range(9), *range(5), 0, 1]] * len(inputs),
            "sequence_lengths": [[9, 5]] * len(inputs),
        }
        parquet.write_table(pa.table(rows), folder / f"{split}-00000-of-00001.parquet")
    return {
        "model__LLM__data_location": {"Preprocessed": str(folder)},
        "model__LLM__data_type": "Finetuning",
    }


def test_a_liar_among_packed_rows_is_found_again_with_the_bundle_alone(packed, tmp_path, capsys):
    data = make(tmp_path, faults__schedule=[FLIP, OTHERWISE], **packed)
    verdict = read_json(data / "verdict/verdict.json")
    finding, other = verdict["findings"]
    assert (finding["peer"], finding["kind"], verdict["not_comparable"]) == (1, "message", None)
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
    data = make(tmp_path, **packed)
    assert read_json(data / "verdict/verdict.json")["accepted"]
    first, *_, last = Transcript(data / "trained/transcript").rounds
    assert first.loss > last.loss
    numbers = read_json(data / "evaluate/evaluate.json")
    assert (numbers["sequences"], numbers["tokens"]) == (4, 4 * 9)
    assert numbers["held_out_loss"] == pytest.approx(last.held_out_loss, abs=1e-4)
