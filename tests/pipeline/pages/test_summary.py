"""The table that a run ends with, and its exit status."""

import sys

import pytest

from lockstep.files import read_json, write_json, write_text
from pipeline import runfile
from pipeline.pages import summary
from pipeline.stage.artifacts import METRICS, Paths
from tests import tiny
from tests.errors import refused
from tests.pipeline.finished_run import CAUGHT, LIAR, finish


def finished(root, **choices) -> Paths:
    paths = Paths("report", finish(root, **choices), root)
    with paths.building() as folder:
        write_text(folder / summary.PAGE, "<!doctype html>")
    return paths


def test_an_accepted_run_ends_with_its_export_and_status_zero(tmp_path, capsys):
    paths = finished(tmp_path)
    assert summary.show(paths) == 0
    out = capsys.readouterr().out
    for said in (
        "8.317 -> 5.617 nats per token (chance: 8.318)",
        "2.312",
        "0.12 % of the windows of 32 tokens looked up stand in the train text",
        "162,816 in 40 rounds",
        "34.0 kB per peer and round; plain data parallelism sends 8.0 MB, 235 times as much",
        "accepted: 40 rounds audited, 4 of 16 windows replayed bit for bit",
        str(tmp_path / "data" / "report" / "report.html"),
        "    def f(x):",
    ):
        assert said in out
    assert out.splitlines()[-1] == f"The export is ready: {tmp_path / 'data' / 'export'}"


def test_a_refused_run_ends_with_peer_round_and_kind_and_status_one(tmp_path, capsys):
    assert summary.show(finished(tmp_path, findings=(LIAR,))) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "REFUSED, no weights were exported: peer 2 in round 12 (message)"
    assert any(line.split() == ["export", "refused"] for line in out)
    assert "generated text:" not in out


def test_an_accepted_run_says_who_was_caught_and_discarded(tmp_path, capsys):
    assert summary.show(finished(tmp_path, findings=(CAUGHT, CAUGHT | {"peer": 1}))) == 0
    out = capsys.readouterr().out
    said = "accepted: 40 rounds audited, 4 of 16 windows replayed bit for bit; "
    assert said + "2 liars caught and ejected\n" in out
    assert out.splitlines()[-1].startswith("The export is ready")


def test_the_command_exits_with_the_status(tmp_path):
    paths = finished(tmp_path, findings=(LIAR,))
    done = tiny.python("-m", "pipeline", "summary", "--run", paths.run, "--root", tmp_path)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("terminal", [False, True])
def test_text_of_a_model_cannot_steer_a_terminal(tmp_path, capsys, monkeypatch, terminal):
    paths = finished(tmp_path, text="def \x1b[2J\x07[red]x\u202e\u00e9")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    summary.show(paths)
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out and "\x07" not in out and "\u202e" not in out
    assert "[red]x" in out
    assert terminal or out.isascii()


def test_without_held_out_text_it_says_so(tmp_path, capsys):
    assert summary.show(finished(tmp_path, held_out=False, text=None)) == 0
    out = capsys.readouterr().out
    assert "not measured, since nothing is held out" in out


def test_rows_that_are_no_tokens_are_counted_as_rows(tmp_path, capsys):
    paths = finished(tmp_path)
    shards, trained = paths.out("download") / "shards.json", paths.out("train") / METRICS
    write_json(shards, read_json(shards) | {"rows": 0})
    assert summary.show(paths) == 0
    count = read_json(trained / "train.json")["tokens"] // runfile.load(paths.run).llm.max_seq_len
    assert f" rows {count:,} in " in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("stage", summary.SHOWN_STAGES)
def test_a_missing_result_is_one_line_that_names_the_stage(tmp_path, stage):
    paths = finished(tmp_path)
    (tmp_path / paths.keys.made(stage)).unlink()
    with refused(f"expected from stage {stage} "):
        summary.show(paths)
