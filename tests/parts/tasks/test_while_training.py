"""Scores while a model trains are never in the bits of training."""

import pytest

from pipeline.monitor.monitor import Terminal
from tests import tiny
from tests.pipeline.monitor.test_training_scores import HEAD, steps

pytestmark = pytest.mark.long

ROUNDS, EVERY, VOCABULARY, LENGTH = 6, 2, 300, 48


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """A training that is scored, and killed once; and the same without scores."""
    text = tmp_path_factory.mktemp("text") / "text"
    text.mkdir()
    for document in range(40):
        lines = (f"value_{document}_{n} = {document * n}" for n in range(40))
        (text / f"{document}.py").write_text("\n".join(lines))
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
