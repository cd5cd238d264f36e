"""Tasks by name and by YAML file: what each results in, its hash and pin, and what is refused."""

import json
import re
import socket
from importlib import metadata
from pathlib import Path

import jax
import pytest
import yaml

from lockstep.errors import LockstepError
from lockstep.files import read_json
from parts.tasks import lm_eval_tasks
from pipeline import evaluate, runfile
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths
from tests.errors import refused
from tests.parts.tasks import exported
from tests.parts.tasks.harness.local_tasks import QUESTIONS, run
from tests.pipeline import trained_run


def place(store, rows):
    """Leave ARC-Easy in the store as `datasets` keeps what it has downloaded."""
    import datasets

    made = store.parent / "made"
    made.mkdir()
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {split: str(made / "rows.jsonl") for split in ("train", "validation", "test")}
    datasets.load_dataset("json", data_files=files, cache_dir=str(made))
    [info] = made.glob("json/*/*/*/dataset_info.json")
    folder = store / "datasets" / "allenai___ai2_arc" / "ARC-Easy" / "0.0.0" / ("ab" * 20)
    folder.mkdir(parents=True)
    for path in info.parent.glob("json-*.arrow"):
        path.rename(folder / path.name.replace("json-", "ai2_arc-"))
    said = json.loads(info.read_text()) | {"config_name": "ARC-Easy", "dataset_name": "ai2_arc"}
    (folder / "dataset_info.json").write_text(json.dumps(said))


def arc(number, answer="B", choices=4):
    letters = "ABCDE"[:choices]
    texts = [f"answer {number} {letter}" for letter in letters]
    choices = {"text": texts, "label": list(letters)}
    return {"id": str(number), "question": f"What is {number}?", "choices": choices} | {
        "answerKey": answer
    }


def test_a_task_of_lm_eval_runs_on_what_the_store_holds_and_no_other(folder, tmp_path, monkeypatch):
    import datasets.config
    from huggingface_hub import constants

    place(tmp_path / "store", [arc(0), arc(1, "A", choices=5), arc(2, choices=5)])
    with monkeypatch.context() as online:  # which is not made use of
        asked = []
        online.setattr(socket, "getaddrinfo", lambda *where, **_: asked.append(where))
        online.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        online.setattr(constants, "HF_HUB_OFFLINE", False)
        results, samples = run(folder, ["arc_easy"], tmp_path)
    assert not asked
    result = results["arc_easy"]
    assert list(result.metrics) == ["acc_norm", "acc"]  # Psyche's first
    assert (result.documents, result.few_shot) == (3, 0)
    assert result.chance == pytest.approx((1 / 4 + 1 / 5 + 1 / 5) / 3)
    assert result.source == f"lm_eval {lm_eval_tasks.version()}: allenai/ai2_arc (ARC-Easy)"
    right = [sample["acc"] for sample in samples]
    share = sum(right) / 3
    assert result.metrics["acc"].value == pytest.approx(share)
    # of a mean of three zeros and ones
    assert result.metrics["acc"].stderr == pytest.approx((share * (1 - share) / 2) ** 0.5)

    hashes = json.loads((tmp_path / "hashes.json").read_text())
    assert hashes["tasks"] == {"arc_easy": result.sha256}
    pin = hashes["sha256"]
    settings = {"few_shot": 2, "limit": 2}
    shown, samples = run(folder, ["arc_easy"], tmp_path, **settings)
    assert (shown["arc_easy"].documents, shown["arc_easy"].few_shot) == (2, 2)
    assert samples[0]["arguments"][0][0].count("Question:") == 3
    with refused("[pins] tasks", pin, "arc_easy"):
        run(folder, ["arc_easy"], tmp_path, pin=pin, few_shot=2)  # of which examples are a part
    run(folder, ["arc_easy"], tmp_path, pin=pin, limit=1)

    with pytest.raises(LockstepError) as error:
        run(folder, ["piqa"], tmp_path)
    assert re.fullmatch(
        r"\[evaluate\] tasks: piqa: .*baber/piqa.*; expected its data in .*/store/datasets, or .*",
        str(error.value),
    )


def test_a_task_that_cannot_be_is_one_line(folder, tasks, tmp_path, monkeypatch):
    given = [
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        ([tasks["choices"], tasks["choices"]], "found choices in .* expected each task once"),
    ]
    for names, said in given:
        with pytest.raises(LockstepError, match=rf"^\[evaluate\] tasks: .*{said}"):
            run(folder, names, tmp_path)
    for text, said in (("a: [", "expected YAML"), ("a: b", "expected a key task or group")):
        (tmp_path / "not.yaml").write_text(text)
        with pytest.raises(LockstepError, match=rf"^\[evaluate\] tasks: .*not.yaml: .*{said}"):
            run(folder, [str(tmp_path / "not.yaml")], tmp_path)
    broken = tmp_path / "broken.yaml"
    broken.write_text("task: broken\ndataset_path: json\noutput_type: guessing\n")
    with pytest.raises(LockstepError, match=r"broken.yaml: ValueError: .*guessing.*; expected"):
        run(folder, [str(broken)], tmp_path)
    unsafe = tmp_path / "unsafe.yaml"
    unsafe.write_text(f"{Path(tasks['choices']).read_text()}unsafe_code: true\n")
    with pytest.raises(LockstepError, match=r"unsafe.yaml: runs code that the model writes"):
        run(folder, [str(unsafe)], tmp_path)

    def absent(_):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(lm_eval_tasks.metadata, "version", absent)
    with pytest.raises(LockstepError, match=r"lm_eval is not installed, .* '.\[eval\]'"):
        run(folder, ["arc_easy"], tmp_path)


def test_more_examples_than_documents_are_one_line(folder, tasks, tmp_path):
    shown = tmp_path / "shown.yaml"
    shown.write_text(f"{Path(tasks['choices']).read_text()}num_fewshot: 50\n")
    for name, settings, said in (
        (tasks["choices"], {"few_shot": 7}, r"\[evaluate\] few_shot is 7, expected at most 6"),
        (str(shown), {}, "its num_fewshot is 50, expected at most 6"),
    ):
        with pytest.raises(LockstepError, match=rf"^\[evaluate\] tasks: {name}: {said}"):
            run(folder, [name], tmp_path, **settings)
    shown.write_text(
        shown.read_text().replace("num_fewshot: 50", "num_fewshot: 6") + "fewshot_split: test\n"
    )
    with refused("num_fewshot", 6, 5):
        run(folder, [str(shown)], tmp_path)  # its own document is left out
    run(folder, [tasks["choices"]], tmp_path, few_shot=6, limit=1)


def test_empty_texts_score_as_with_transformers_and_what_a_metric_cannot_say_is_one_line(
    folder, tasks, tmp_path
):
    data, task = tmp_path / "texts.jsonl", tmp_path / "texts.yaml"
    data.write_text('{"t": ""}\n')
    rolling = Path(tasks["rolling"]).read_text().replace("task: rolling", "task: texts")
    rolling, metrics = re.sub(r"test: /\S+jsonl", f"test: {data}", rolling).split("metric_list")
    task.write_text(f"{rolling}metric_list: [{{metric: word_perplexity}}]\n")
    results, _ = run(folder, [str(task)], tmp_path)
    assert results["texts"].metrics["word_perplexity"].value == 1  # as lm_eval's `hf` has it
    task.write_text(f"{rolling}metric_list{metrics}")
    with pytest.raises(LockstepError, match=r"^\[evaluate\] tasks: .*: ZeroDivisionError"):
        run(folder, [str(task)], tmp_path)
    task.write_text(rolling.replace("{{t}}", "{{t}}{{'\\\\ud800'}}"))
    with pytest.raises(LockstepError, match=r"^\[evaluate\] tasks: .*: TypeError: TextInput"):
        run(folder, [str(task)], tmp_path)


def test_the_hash_is_of_documents_and_definition_and_not_of_their_places(tasks, tmp_path):
    def sha256(place, **replaced):
        place.mkdir()
        data = Path(tasks["choices"]).with_suffix(".jsonl").read_text()
        text = Path(tasks["choices"]).read_text()
        for old, new in replaced.items():
            data, text = data.replace(old, new), text.replace(old, new)
        (place / "choices.jsonl").write_text(data)
        text = re.sub(r"test: /\S+jsonl", f"test: {place}/choices.jsonl", text)
        (place / "choices.yaml").write_text(text)
        with lm_eval_tasks.data_in(tmp_path / "store", trusted=True):
            names = [str(place / "choices.yaml")]
            [loaded] = lm_eval_tasks.load(names, tmp_path / "store", trusted=True)
            return lm_eval_tasks.sha256_of(loaded, None)

    plain = sha256(tmp_path / "a")
    assert sha256(tmp_path / "b") == plain
    assert sha256(tmp_path / "c", Which="What") != plain
    assert sha256(tmp_path / "d", acc_bytes="acc_mutual_info") != plain


def test_a_yaml_file_goes_by_its_tasks_name_and_has_chance_if_it_is_a_choice(
    folder, tasks, tmp_path
):
    alone = Path(tasks["choices"]).read_text()
    both = [alone.replace("task: choices", f"task: {name}") for name in ("one", "other")]
    parts = [f"  - {json.dumps(yaml.safe_load(text))}" for text in both]
    means = "aggregate_metric_list: [{metric: acc, weight_by_size: true}]"
    group = tmp_path / "group.yaml"
    group.write_text("\n".join(["group: pair", means, "task:", *parts]))
    results, _ = run(folder, [tasks["choices"], str(group), tasks["rolling"]], tmp_path)
    choices = results["choices"]
    counts = [len(question["c"]) for question in QUESTIONS]
    assert choices.chance == pytest.approx(sum(1 / n for n in counts) / len(counts))
    rolling = results["rolling"]
    assert rolling.chance is None and rolling.metrics["bits_per_byte"].stderr is None
    assert set(results) == {"choices", "pair", "rolling"}
    assert list(results["pair"].metrics) == ["acc"]
    assert results["pair"].metrics["acc"].value == choices.metrics["acc"].value
    assert results["pair"].documents == 2 * choices.documents
    assert results["pair"].chance == pytest.approx(choices.chance)


def test_stage_evaluate_runs_the_tasks_and_they_can_be_pinned(tasks, tmp_path, monkeypatch):
    made = trained_run.make(
        tmp_path,
        model={"max_position_embeddings": exported.CONTEXT},
        tokenizer={"bos_token": "<|endoftext|>"},
        held_out=False,
        evaluate__tasks=[tasks["choices"]],
        evaluate__trust_task_code=True,
        evaluate__max_new_tokens=1,
    )
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)

    def stage():
        paths = Paths("evaluate", made.run, tmp_path)
        evaluate.run(runfile.load(made.run), paths)
        return paths.out("evaluate")

    out = stage()
    [result] = read_json(out / "evaluate.json")["tasks"]
    assert (result["name"], result["documents"]) == ("choices", len(QUESTIONS))
    scores = read_json(tmp_path / "metrics" / "evaluate.json")["tasks"]
    assert scores["choices"]["acc"] == result["metrics"]["acc"]["value"]
    assert list(scores) == ["choices"]
    assert len((out / "tasks" / "samples.jsonl").read_text().splitlines()) == len(QUESTIONS)

    hashes = read_json(out / "tasks" / "hashes.json")
    assert hashes["tasks"] == {tasks["choices"]: result["sha256"]}
    before_pins = made.run.read_text()
    assert pins.write(made.run, tmp_path)["tasks"] == hashes["sha256"]
    # this pin alone: the folders of the other stages were made by hand
    made.run.write_text(before_pins.replace('tasks = ""', f'tasks = "{"ab" * 32}"'))
    with refused("[pins] tasks"):
        stage()
