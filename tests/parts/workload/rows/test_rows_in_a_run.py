"""Rows that are not tokens, in what reads the shards of a run and expects text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.files import read_json
from lockstep.programs.columns import PLAIN
from pipeline import download, runfile
from pipeline.audit import rows_file
from pipeline.language_model import held_out
from pipeline.language_model.subject import LanguageModelSubject
from pipeline.monitor.monitor import Monitor
from pipeline.pages.report_page import _data
from pipeline.sources import dry_run
from pipeline.stage.artifacts import INPUTS, Paths
from pipeline.start import set_up
from pipeline.tokens.shards import read_shards
from tests import tiny
from tests.errors import refused

WIDTH = 5  # words: four of x, one of y
Stage = Callable[..., tuple[runfile.Run, Path]]


@pytest.fixture
def stage(tmp_path) -> Stage:
    """Runs the stage download on 40 rows of arrays; returns the run and its shards."""
    arrays = {"x": np.arange(160, dtype=np.float32).reshape(40, 4), "y": np.arange(40) > 9}
    save_file(arrays, path := tmp_path / "a.safetensors")
    rows = {"path": str(path), "held_out_percent": 25.0, "shuffle": "DontShuffle"}

    def stage(**changes: object) -> tuple[runfile.Run, Path]:
        given = {"model__LLM__max_seq_len": WIDTH, "model__LLM__data_location": {"Arrays": rows}}
        run_file, _ = tiny.start(tmp_path, **given | changes)
        run, paths = runfile.load(run_file), Paths("download", run_file, tmp_path)
        download.run(run, paths)
        return run, paths.out("download")

    return stage


def test_a_language_model_is_not_trained_on_them(stage, tmp_path):
    run, shards = stage()
    with refused("model.LLM.data_location.Arrays", "rows are arrays", "tokens"):
        set_up.read_to_train(run, tmp_path, shards)


def test_another_width_than_the_runs_is_refused_with_both_and_the_file(
    stage, tmp_path, monkeypatch
):
    run, shards = stage(model__LLM__max_seq_len=16)
    monkeypatch.setattr(LanguageModelSubject, "any_rows", True)  # as a workload does
    with refused("model.LLM.max_seq_len", 16, 5, tmp_path / "a.safetensors"):
        set_up.read_to_train(run, tmp_path, shards)


def test_every_held_out_row_is_measured_also_one_of_a_single_word(stage):
    run, shards = stage(held_out__sequences=100)
    found = held_out.read(run, shards)
    assert found.rows_NW.shape == (10, WIDTH) and found.columns == PLAIN
    assert found.split_size == 10
    single = run.llm.model_copy(update={"max_seq_len": 1})
    narrow = run.model.model_copy(update={"LLM": single})
    assert len(held_out.read(run.model_copy(update={"model": narrow}), shards).rows_NW) == 50


def test_a_bundles_rows_may_have_any_words(stage, tmp_path):
    run, _ = stage()
    edges = np.array([[0, -1, -(2**31), 2**31 - 1, -100]], np.int32)
    rows = rows_file.GivenRows("a", np.array([7]), edges)
    rows_file.write(tmp_path / "rows.safetensors", rows, np.array([7]))
    found = rows_file.read(tmp_path / "rows.safetensors", PLAIN, run, None)
    assert found.take(np.array([7])).tolist() == edges.tolist()
    with refused("inputs", 0, 9):
        rows_file.read(tmp_path / "rows.safetensors", PLAIN, run, 9)
    other = runfile.parse(tiny.run_document(tmp_path).unwrap(), "a test")
    with refused(16):
        rows_file.read(tmp_path / "rows.safetensors", PLAIN, other, None)


def test_report_and_monitor_count_rows(stage, tmp_path):
    run, shards = stage()
    assert run.llm.counted == ("rows", WIDTH)
    shown = Monitor(run, tmp_path / "run.toml", tmp_path, 0).fields
    assert "rows_per_second" in shown and "tokens_per_second" not in shown
    rounds = [{"round": {"data_index": 0, "batch_size": 12}}]
    told = dict(_data(run, read_json(shards / "shards.json"), rounds))
    assert told["To train on"] == "30 rows" and told["Held out"] == "10 rows, never trained on"
    assert told["Used"] == "12 rows of 5 words of 4 bytes, 40 %, none twice"


def test_the_stage_says_what_a_row_is(stage):
    _, shards = stage()
    assert download.summary(read_shards(shards)) == (
        "30 train rows in 1 files, 10 held_out rows in 1 files; 5 words of 4 bytes a row: "
        "x float32 [4], y bool []"
    )


def test_a_dry_run_says_what_max_seq_len_has_to_be(stage, tmp_path):
    run, _ = stage(model__LLM__max_seq_len=16)
    lines = [*dry_run.lines(run, Paths("download", tmp_path / "run.toml", tmp_path))]
    assert "  rows       30 to train on, 10 held out: 5 words each" in lines
    assert "  warning    model.LLM.max_seq_len is 16, expected 5, as a row has" in lines
    assert any(line.startswith("  the run    24 rows in 6 steps: ") for line in lines)
    run, _ = stage()
    lines = dry_run.lines(run, Paths("download", tmp_path / "run.toml", tmp_path))
    assert not any("warning" in line for line in lines)


def test_a_pin_holds_the_run_to_the_arrays(stage, tmp_path):
    run, shards = stage()
    key, *within = INPUTS["download"][1:]
    pin = read_json(shards / key)[within[0]]["sha256"]
    stage(pins__data=pin)
    arrays = {"x": np.zeros((40, 4), np.float32), "y": np.zeros(40, bool)}
    save_file(arrays, tmp_path / "a.safetensors")
    with refused("[pins] data", pin):
        stage(pins__data=pin)
