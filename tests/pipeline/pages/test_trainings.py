"""Trainings of several keys side by side, and one in progress on a page that refreshes itself."""

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import sha256_file, write_json
from pipeline.monitor import find, training
from pipeline.monitor.status import Status
from pipeline.pages import commands as pages
from pipeline.pages import live, plots, trainings
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths, read_made
from tests.pipeline.finished_run import ROUNDS, SCORED, finish

RECORDED = {"config": {"total_steps": ROUNDS}, "model": {"LLM": {"max_seq_len": 8}}}


def train(root: Path, **model: object) -> str:
    """Leaves a finished training whose transcript says what was run; returns its key."""
    run_file = finish(root)
    paths = Paths("train", run_file, root)
    header = paths.out("train") / "transcript" / "header.json"
    said = json.loads(header.read_text())
    said["run"] = RECORDED | {"peers": {"count": 4}, "links": {}}
    said["run"]["model"] = {"LLM": {"max_seq_len": 8} | model}
    header.write_text(json.dumps(said))
    return paths.key


def renamed(folder: Path, key: str) -> None:
    header = folder / "transcript" / "header.json"
    header.write_text(json.dumps(json.loads(header.read_text()) | {"key": key}))


def to_cache(folder: Path, project: Path, number: int = 0) -> None:
    """Puts a folder into DVC's cache, as DVC does, and takes it away."""
    cache, listed = project / ".dvc" / "cache" / "files" / "md5", []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = sha256_file(path)[:32]  # any name by content would do
        (cache / name[:2]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, cache / name[:2] / name[2:])
        listed.append({"md5": name, "relpath": path.relative_to(folder).as_posix()})
    (cache / "ab").mkdir(parents=True, exist_ok=True)
    (cache / "ab" / f"{number}.dir").write_text(json.dumps(listed))
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """One training in DVC's cache, one in data/trained, one in data/runs, one elsewhere."""
    root = tmp_path_factory.mktemp("trainings")
    train(root, optimizer="first")
    renamed(trained := root / "data" / "trained", "aaaa")
    to_cache(trained, root)
    train(root, optimizer="second")
    renamed(trained, "bbbb")
    shutil.copytree(trained / "transcript", root / "data" / "runs" / "cccc" / "transcript")
    renamed(running := root / "data" / "runs" / "cccc", "cccc")
    rounds = running / "transcript" / "rounds.jsonl"
    rounds.write_text("".join(rounds.read_text().splitlines(keepends=True)[:15]))
    shutil.copytree(trained, root / "elsewhere" / "data" / "trained")
    return root


def test_trainings_are_found_wherever_they_are(root):
    names = ["aaaa", "bbbb", "cccc", str(root / "elsewhere")]
    found = [trainings.read(name, root) for name in names]
    assert [len(run.rows) for run in found] == [ROUNDS, ROUNDS, 15, ROUNDS]
    assert [len(run.held_out) for run in found] == [5, 5, 2, 5]  # with that before the first round
    optimizers = [run.settings.value("model.LLM.optimizer") for run in found[:2]]
    assert optimizers == ['"first"', '"second"']
    with pytest.raises(LockstepError, match=r"dddd: no such training.*aaaa, bbbb, cccc$"):
        trainings.read("dddd", root)


def test_page_has_all_trainings_and_where_they_differ(root, monkeypatch):
    lines = []
    draw = plots._curves
    monkeypatch.setattr(plots, "_curves", lambda *given: lines.append(given) or draw(*given))
    monkeypatch.setattr(plots, "_png", lambda *_: b"")
    pages.report(["aaaa", "bbbb", "cccc"], compare=True, live=False, root=root, out=None)
    page = (root / trainings.PAGE).read_text()
    assert "<h1>aaaa against bbbb against cccc</h1>" in page
    assert re.search(r"Rounds</th>.*>40<.*>40<.*>15<", page)
    assert "model.LLM.optimizer" in page and "max_seq_len" not in page  # the same in all
    assert "Held out, by step" in page
    assert {len(given[0]) for given in lines} == {3}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> Path:
    """Two runs with all their stages, one in DVC's cache; and a training of one that goes on."""
    root = tmp_path_factory.mktemp("evaluated")
    for edits in ({"questions": "50", "snapshot_every": "20"}, {}):
        finish(root, edits=edits)
        if edits:
            for number, folder in enumerate(sorted((root / "data").iterdir())):
                to_cache(folder, root, number)
    shutil.copytree(root / "data/trained/transcript", root / "data/runs/cccc/transcript")
    renamed(root / "data/runs/cccc", "cccc")
    return root


def compared(root: Path) -> tuple[str, dict[str, list[str]]]:
    """The page of all trainings, and its rows, by their names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_png", lambda *_: b"")
        known = sorted(find._known(root))
        trainings.compare(known, root, root / trainings.PAGE)
    page = (root / trainings.PAGE).read_text()
    rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', page)
    return page, {name: re.findall(r">([^<]+)</td>", row) for name, row in rows}


def test_a_comparison_knows_every_table_of_runs_whose_stages_are_there(evaluated):
    _, rows = compared(evaluated)
    assert sorted(rows["witness.snapshot_every"]) == ["10", "20", "unknown"]
    assert sorted(rows["evaluate.questions"]) == ["50", "500", "unknown"]
    assert not {"export.dtype", "peers.count", "witness.policy"} & rows.keys()  # the same in all


def test_a_comparison_has_the_scores_and_the_verdict_of_each_run(evaluated):
    page, rows = compared(evaluated)
    scores = rows["Score of the export, next_line acc"]
    assert scores == ["0.310 (0.267 to 0.357, chance 0.25)"] * 2  # and none of the third
    assert all(said.startswith("accepted: 40 rounds audited") for said in rows["Verdict"])
    assert "A value is unknown where its stage has no result" in page


def test_results_of_another_training_are_not_taken_for_its_own(evaluated, tmp_path):
    """The evaluation lies where it would be looked for, and read another export."""
    shutil.copytree(evaluated / "data", tmp_path / "data")
    (made,) = (tmp_path / "data/verdict").glob("made-*.json")
    said = read_made(made)
    said["needs"]["train"] = "00" * 32
    write_json(made, said | {"sha256": artifacts._digest(said)})
    found = trainings.read(str(tmp_path / "data" / "trained"), tmp_path)
    assert found.verdict is None and found.evaluated is None
    assert found.settings.value("witness.policy") == "unknown"
    assert found.settings.value("held_out.sequences") == "512"


def test_every_training_has_a_line_of_its_own():
    rows = [{"step": 1.0, "loss": 2.0, "bytes_up": 9.0}] * 2
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_curves", lambda lines, *_: seen.append(lines) or b"")
        plots.comparison_pictures({str(n): rows for n in range(20)}, {})
    for lines in seen:
        assert len({(line.style["color"], line.style["ls"]) for line in lines}) == 20


def test_a_live_page_follows_a_training_to_its_end(root, tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "_png", lambda *_: b"")
    monkeypatch.setattr(live, "POLL_SECONDS", 0.01)
    folder = tmp_path / "data" / "runs" / "cccc"
    shutil.copytree(root / "data" / "runs" / "cccc", folder)
    status = Status(run="run.toml", process=os.getpid(), round=15, rounds=40, updated=time.time())
    status.write(folder)
    rounds, page, seen = folder / "transcript" / "rounds.jsonl", tmp_path / live.PAGE, []
    whole = (root / "elsewhere/data/trained/transcript/rounds.jsonl").read_text()

    def until(text: str) -> None:
        deadline = time.monotonic() + 30
        while not (page.is_file() and text in page.read_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
        seen.append(page.read_text())

    def train_on() -> None:
        until("15 of 40")
        rounds.write_text("".join(whole.splitlines(keepends=True)[:30]) + '{"half a line')
        status.model_copy(update={"round": 30, "loss": 6.25}).write(folder)
        until("6.250")
        shutil.rmtree(folder)

    trainer = threading.Thread(target=train_on)
    trainer.start()
    live.watch(tmp_path, page, 0.05)
    trainer.join()
    assert all('<meta http-equiv="refresh" content="0.05">' in text for text in seen)
    assert "stopped" in seen[0]  # nobody holds its lock
    assert "refresh" not in page.read_text() and "30 rounds" in page.read_text()


def test_a_live_page_has_the_loss_before_the_first_round_and_the_scores_so_far(evaluated):
    folder = evaluated / "data" / "runs" / "cccc"
    drawn = []
    Status(run="run.toml", process=1, round=40, rounds=40, updated=time.time()).write(folder)
    growing = live.GrowingRows(folder / "transcript")
    assert live._scores(folder) == []  # a training that is not scored
    (folder / "tasks.tsv").write_text(SCORED + "40\tchoices\tword_perplexity\t9.5\t\t\n")
    recorded = live.Recorded(growing.read(), growing.before, live._scores(folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "_curves", lambda lines, *_: drawn.append(lines) or b"")
        patch.setattr(plots, "_png", lambda *_: b"")
        page = live.render(training.read(folder), recorded, 1.0)
    held_out = drawn[0][1].rows
    assert (held_out[0]["step"], held_out[0]["held_out_loss"]) == (0, growing.before.held_out_loss)
    assert [row["step"] for row in held_out] == [0, 10, 20, 30, 40]
    cells = [re.findall(r">([^<]+)</t[hd]>", row) for row in page.split("<tr>") if "40" in row]
    assert ["next_line", "acc", "40", "0.310", "0.270 to 0.350"] in cells
    assert ["choices", "word_perplexity", "40", "9.500", "unknown"] in cells
    assert "next_line  acc from 0.24 to 0.31" in page


def test_rows_of_a_transcript_that_grows_are_read_once_and_cut_with_it(root, tmp_path):
    shutil.copytree(root / "data" / "runs" / "cccc" / "transcript", tmp_path / "transcript")
    growing = live.GrowingRows(tmp_path / "transcript")
    first = growing.read()[0]
    assert growing.read()[0] is first and len(growing.rows) == 15
    cut = tmp_path / "cut"
    cut.write_text("".join(growing.file.read_text().splitlines(keepends=True)[:10]))
    cut.replace(growing.file)
    assert len(growing.read()) == 10 and growing.rows[9]["bytes_up"] == 10 * 34_000


@pytest.mark.parametrize("given", [(["x"], False, False), ([], True, False), (["x"], True, True)])
def test_what_report_does_not_take_is_one_line(given):
    names, compare, watch = given
    with pytest.raises(LockstepError, match="report: expected nothing, --live, or --compare"):
        pages.report(names, compare=compare, live=watch)
