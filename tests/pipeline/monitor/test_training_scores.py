"""Scores while a model trains: written as they come, each once."""

import threading

import pytest

from pipeline.monitor.training_scores import TrainingScores
from pipeline.scores import Metric, TaskResult

HEAD = "step\ttask\tmetric\tvalue\tlow\thigh\n"


def result(share: float) -> TaskResult:
    return TaskResult("t", {"acc": Metric(share, 0.1)}, 0.25, 100, 0, "", "")


def steps(text: str) -> list[int]:
    head, *lines = text.splitlines()
    assert f"{head}\n" == HEAD
    return [int(line.split("\t")[0]) for line in lines]


def test_rounds_that_are_due_and_the_last_are_scored_at_their_params(tmp_path):
    scores = TrainingScores(tmp_path / "tasks.tsv", lambda share: [result(share)], every=2)
    scores.begin()
    for step in range(6):
        scores.take(step, lambda step=step: step / 10, last=step == 5)
    lines = [line.split("\t") for line in scores.path.read_text().splitlines()[1:]]
    assert [(line[0], line[3]) for line in lines] == [
        ("0", "0.0"), ("2", "0.2"), ("4", "0.4"), ("5", "0.5"),
    ]  # fmt: skip
    assert all(float(low) <= float(value) <= float(high) for *_, value, low, high in lines)


def test_without_every_there_is_a_table_without_rows_and_nothing_is_copied(tmp_path):
    scores = TrainingScores(tmp_path / "tasks.tsv")
    scores.begin()
    scores.take(0, lambda: 1 / 0, last=True)
    assert scores.path.read_text() == HEAD


def test_a_resumed_training_has_each_score_once_and_the_same_table(tmp_path):
    def take(scores: TrainingScores, first: int, last: int) -> None:
        for step in range(first, last + 1):
            scores.take(step, lambda step=step: step / 10)

    whole, killed = (
        TrainingScores(tmp_path / name, lambda share: [result(share)], every=1)
        for name in ("whole", "killed")
    )
    whole.begin()
    take(whole, 0, 5)
    killed.begin()
    take(killed, 0, 4)
    again = TrainingScores(killed.path, lambda share: [result(share)], every=1)
    again.resume(2)  # the checkpoint that it goes on from
    assert steps(killed.path.read_text()) == [0, 1, 2]
    take(again, 3, 5)
    assert again.path.read_bytes() == whole.path.read_bytes()


def test_a_spare_device_scores_while_training_goes_on_and_is_waited_for(tmp_path):
    begun, go_on = threading.Event(), threading.Event()

    def score(share: float) -> list[TaskResult]:
        begun.set()
        assert go_on.wait(10)
        return [result(share)]

    scores = TrainingScores(tmp_path / "tasks.tsv", score, every=1, aside=True)
    scores.begin()
    scores.take(1, lambda: 0.5)
    assert begun.wait(10) and steps(scores.path.read_text()) == []  # it returned before
    go_on.set()
    scores.wait()
    assert steps(scores.path.read_text()) == [1]
    scores.take(2, lambda: "no share")
    with pytest.raises(TypeError):
        scores.wait()
    scores.close()
