"""Trainings of several keys side by side, and one in progress on a page that refreshes itself."""

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from pipeline import __main__ as command_line
from pipeline.errors import LockstepError
from pipeline.monitor.status import Status
from pipeline.pages import live, plots, trainings
from pipeline.stage.artifacts import Paths, sha256_file
from tests.pipeline.finished_run import ROUNDS, finish

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


def to_cache(folder: Path, project: Path) -> None:
    """Puts a folder into DVC's cache, as DVC does, and takes it away."""
    cache, listed = project / ".dvc" / "cache" / "files" / "md5", []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = sha256_file(path)[:32]  # any name by content would do
        (cache / name[:2]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, cache / name[:2] / name[2:])
        listed.append({"md5": name, "relpath": path.relative_to(folder).as_posix()})
    (cache / "ab" / "cd.dir").parent.mkdir(parents=True, exist_ok=True)
    (cache / "ab" / "cd.dir").write_text(json.dumps(listed))
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
    found = [trainings.find(name, root) for name in names]
    assert [len(run.rows) for run in found] == [ROUNDS, ROUNDS, 15, ROUNDS]
    assert [len(run.held_out) for run in found] == [4, 4, 1, 4]
    assert [run.settings["model"]["LLM"]["optimizer"] for run in found[:2]] == ["first", "second"]
    with pytest.raises(LockstepError, match=r"dddd: no such training.*aaaa, bbbb, cccc$"):
        trainings.find("dddd", root)


def test_page_has_all_trainings_and_where_they_differ(root, monkeypatch):
    lines = []
    draw = plots._curves
    monkeypatch.setattr(plots, "_curves", lambda *given: lines.append(given) or draw(*given))
    monkeypatch.setattr(plots, "_png", lambda *_: b"")
    command_line.report(["aaaa", "bbbb", "cccc"], compare=True, live=False, root=root, out=None)
    page = (root / trainings.PAGE).read_text()
    assert "<h1>aaaa against bbbb against cccc</h1>" in page
    assert re.search(r"Rounds</th>.*>40<.*>40<.*>15<", page)
    assert "model.LLM.optimizer" in page and "max_seq_len" not in page  # the same in all
    assert "Held out, by step" in page
    assert {len(given[0]) for given in lines} == {2, 3}  # cccc measured once: no line


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
        command_line.report(names, compare=compare, live=watch)
