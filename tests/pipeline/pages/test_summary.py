"""The table that a run ends with, and its exit status."""

import subprocess
import sys

import pytest

from pipeline.errors import LockstepError
from pipeline.pages import summary
from pipeline.stage.artifacts import Paths, write_text
from pipeline.stage.keys import PROJECT
from tests.pipeline.finished_run import CAUGHT, LIAR, finish, verdict


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
        "163,840 in 40 rounds",
        "34.0 kB per peer and round; plain data parallelism 8.0 MB, 235 times as much",
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


@pytest.mark.parametrize(("findings", "status"), [((), 0), ((CAUGHT,), 0), ((LIAR,), 1)])
def test_the_command_exits_with_the_status(tmp_path, findings, status):
    paths = finished(tmp_path, findings=findings)
    command = [sys.executable, "-m", "pipeline", "summary", "--run", paths.run, "--root", tmp_path]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, "")


def test_in_a_terminal_the_same_is_said(tmp_path, capsys, monkeypatch):
    root = tmp_path / "a[red]b"
    root.mkdir()
    paths = finished(root)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "300")
    assert summary.show(paths) == 0
    out = capsys.readouterr().out
    assert out.count("a[red]b") == 3
    assert "8.317 -> 5.617" in out and "accepted: 40 rounds" in out and "def f(x):" in out


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
    assert "not measured: the data has no held-out split" in out


@pytest.mark.parametrize("stage", summary.READ)
def test_a_missing_result_is_one_line_that_names_the_stage(tmp_path, stage):
    paths = finished(tmp_path)
    (tmp_path / paths.keys.made(stage)).unlink()
    with pytest.raises(LockstepError) as caught:
        summary.show(paths)
    assert f"expected from stage {stage} " in str(caught.value) and "\n" not in str(caught.value)


# ---- verdict.txt ----


def test_a_refused_verdict_says_why_and_how_to_repeat_each_finding():
    text = summary.of_verdict(verdict((LIAR,)))
    assert text.splitlines() == [
        "REFUSED: 1 finding got into the params, and policy applied refuses those",
        "  method      bit for bit",
        "  audited     40 rounds, all of them",
        "  replayed    4 of 16 windows: 1-10 of peer 3; 11-20 of peer 2; 21-30 of peer 0; 31-40 of",
        "              peer 1",
        "  drawn from  5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed, the",
        "              transcript's own hash; whoever wrote the whole transcript could have tried",
        "              until the sample suited: supply [witness] seed against that",
        "  transcript  sha256 5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed",
        "  late        peer 3 1 time",
        "round 12, peer 2, message; it got into the params:",
        "  sent 0123, its replay gives <4567>",
        "  lockstep replay data/verdict/bundles/00011-00020-peer-02",
    ]
    assert max(map(len, text.splitlines())) <= summary.WIDTH


def test_an_accepted_verdict_says_who_was_ejected_dropped_or_late():
    said = verdict((CAUGHT,), dropped={"0": 7, "1": 9}, late={"0": 2})
    said |= {"sample_seed": "5eed", "sample_seed_of": "auditor"}
    text = summary.of_verdict(said)
    assert text.startswith("accepted: none of 1 finding got into the params (policy applied)\n")
    for line in (
        "  ejected     peer 2 in round 12",
        "  dropped out peer 0 in round 7, peer 1 in round 9",
        "  late        peer 0 2 times",
        "round 12, peer 2, commitment; it did not get into the params:",
    ):
        assert line in text.splitlines()
    assert "the auditor's own" in text and "whoever wrote" not in text


def test_policy_strict_and_a_tolerance_are_named():
    why = "jax is 'B' here, was 'A' in training"
    said = verdict((CAUGHT,), policy="strict", accepted=False, method="tolerance", tolerance=0.05)
    text = summary.of_verdict(said | {"why_not_bitwise": why})
    assert text.startswith("REFUSED: 1 finding, and policy strict refuses any\n")
    assert f"  method      within a tolerance of 0.05, because {why}\n" in text
    assert summary.of_verdict(verdict()).startswith("accepted: nothing was found\n")


def test_a_seed_cannot_steer_a_terminal():
    assert "\x1b" not in summary.of_verdict(verdict(sample_seed="\x1b[2J"))


@pytest.mark.parametrize(
    ("ejected", "said"),
    [
        ({}, "2 liars caught"),
        ({"1": 3}, "2 liars caught, 1 of them ejected"),
        ({"1": 3, "2": 3, "0": 4}, "2 liars caught and ejected"),
    ],
)
def test_liars_are_counted_once_each_and_those_that_were_ejected(ejected, said):
    findings = (CAUGHT, CAUGHT | {"round": 13}, CAUGHT | {"peer": 1})
    assert summary.caught(verdict(findings, ejected=ejected)) == said


def test_blame_gives_each_peer_and_kind_once_with_its_first_round():
    findings = [
        {"peer": 2, "round": 20, "kind": "message"},
        {"peer": 2, "round": 12, "kind": "message"},
        {"peer": 2, "round": 30, "kind": "message"},
        {"peer": None, "round": 3, "kind": "params"},
    ]
    assert (
        summary.blame(findings)
        == "peer 2 in round 12 (message); the transcript in round 3 (params)"
    )


def test_blame_of_many_is_still_one_line():
    findings = [{"peer": peer, "round": 1, "kind": "message"} for peer in range(60)]
    said = summary.blame(findings)
    assert said.endswith("peer 3 in round 1 (message); and 56 more")


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (999.4, "999 bytes"),
        (999.6, "1.0 kB"),
        (34_123, "34.1 kB"),
        (999_600, "1.0 MB"),
        (8_546_304, "8.5 MB"),
        (2.5e9, "2.5 GB"),
        (7e15, "7,000.0 TB"),
    ],
)
def test_sizes_are_in_powers_of_1000(count, said):
    assert summary.size(count) == said
