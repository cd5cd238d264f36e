"""Scores while a model trains: written as they come, and never in the bits of training."""

import threading

import pytest

from pipeline.monitor.monitor import Terminal
from pipeline.monitor.training_scores import TrainingScores
from pipeline.scores import Metric, TaskResult
from pipeline.stage.keys import PROJECT
from tests import tiny

ROUNDS, EVERY, VOCABULARY, LENGTH = 6, 2, 300, 48
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


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """A training that is scored, and killed once; and the same without scores."""
    text = tmp_path_factory.mktemp("text") / "text"
    text.mkdir()
    for path in sorted((PROJECT / "lockstep" / "optim").rglob("*.py")):
        (text / f"{path.parent.name}-{path.name}").write_text(path.read_text())
    model = tiny.MODEL | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    model |= {"num_hidden_layers": 1, "bos_token_id": 0, "eos_token_id": 0}
    location = {"source": str(text), "files": ["*.py"], "vocab_size": VOCABULARY}
    location |= {"held_out_percent": 20.0, "shuffle": "DontShuffle"}
    roots = {}
    for name, every in (("scored", EVERY), ("plain", 0)):
        root = roots[name] = tmp_path_factory.mktemp(name)
        document = tiny.run_document(
            text,
            config__total_steps=ROUNDS,
            model__LLM__max_seq_len=LENGTH,
            model__LLM__checkpoint={"Init": {"seed": 0, "config": model}},
            model__LLM__data_location={"Text": location},
            evaluate__every=every,
            evaluate__sample=20,
            runtime__sinks=["tensorboard"] if every else [],
        )
        tiny.write_run(root / "run.toml", document)
        tiny.make(root / "run.toml", root, "download", "convert")
        if every:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Terminal, "kept", killed_after(EVERY))
                with pytest.raises(KeyboardInterrupt):
                    tiny.make(root / "run.toml", root, "train")
        tiny.make(root / "run.toml", root, "train")
    return roots


def killed_after(step: int):
    def kill(terminal, entry, progress) -> None:
        if entry.round.step == step:
            raise KeyboardInterrupt

    return kill


def test_scores_are_never_in_the_bits_of_training(trainings):
    scored, plain = (
        tiny.contents(root / "data" / "trained" / "transcript") for root in trainings.values()
    )
    assert scored.keys() == plain.keys() and any("snapshots" in name for name in scored)
    assert [name for name in scored if scored[name] != plain[name]] == ["header.json"]  # its key


def test_a_training_that_was_killed_has_a_score_for_each_of_its_rounds(trainings):
    found = {name: (root / "metrics" / "tasks.tsv").read_text() for name, root in trainings.items()}
    assert found["plain"] == HEAD
    metrics = len(found["scored"].splitlines()[1:]) // 4
    assert steps(found["scored"]) == [step for step in (0, 2, 4, 6) for _ in range(metrics)]
    assert metrics == 3 and "next_line\tacc\t" in found["scored"]


def test_the_sinks_of_a_run_are_told_its_scores(trainings):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = trainings["scored"]
    (folder,) = (root / "data" / "tracked" / "tensorboard").iterdir()
    told = EventAccumulator(str(folder)).Reload().Scalars("tasks/next_line/acc")
    lines = [line.split("\t") for line in (root / "metrics" / "tasks.tsv").read_text().splitlines()]
    expected = {int(line[0]): float(line[3]) for line in lines if line[2] == "acc"}
    assert len(told) == len(expected) == 4
    assert {event.step: event.value for event in told} == pytest.approx(expected)
