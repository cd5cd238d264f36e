"""lm-evaluation-harness on our model, next to its own backend for transformers, without a network.

One file, so that one process imports lm_eval and torch.
"""

import json
import re
import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest
import yaml

from pipeline import evaluate, runfile
from pipeline.errors import LockstepError
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths, read_json, write_json
from pipeline.tasks import ask_next_line, choices, definitions, harness, next_line, task_file
from tests.pipeline import trained_run
from tests.pipeline.tasks import exported

LONG = "def f(x): return x\n" * 8  # more tokens than the model takes
QUESTIONS = [
    {"q": "def f(x): return", "c": [" x", " y", " def"], "a": 0},
    {"q": "Which letter?", "c": ["A", "B", "C", "D"], "a": 3},  # of one token each
    {"q": LONG, "c": [" x", " return x and more"], "a": 1},
    {"q": "", "c": ["def", "x", "caf\u00e9"], "a": 2},
    {"q": "ends in space ", "c": ["x", "xy"], "a": 0},
    {"q": "<|endoftext|>begins", "c": [" re", " de"], "a": 1},
]
TEXTS = [{"t": "def f"}, {"t": LONG}, {"t": LONG[: -len("return x\n")]}, {"t": "\u00e9"}]
TASKS = {
    "choices": """output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_target: a
doc_to_choice: "{{c}}"
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
""",
    "rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{t}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "writing": """output_type: generate_until
doc_to_text: "{{t}}"
doc_to_target: "{{t}}"
generation_kwargs: {until: ["r"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return exported.write(tmp_path_factory.mktemp("exported") / "export")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    exported.go_offline(monkeypatch)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """YAML files of tasks over local data: name -> path."""
    place = tmp_path_factory.mktemp("tasks")
    for name, lines in (("choices", QUESTIONS), ("texts", TEXTS)):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in TASKS.items():
        data = place / ("choices.jsonl" if name == "choices" else "texts.jsonl")
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        files = f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (place / f"{name}.yaml").write_text(head + files + text)
    return {name: str(place / f"{name}.yaml") for name in TASKS}


def run(folder, names, tmp_path, batch_size=4, pin="", **settings):
    model = exported.model(folder, batch_size=batch_size)
    results = harness.run_tasks(
        names, model, runfile.Evaluate(**settings), tmp_path / "store", pin=pin, folder=tmp_path
    )
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    return {result.name: result for result in results}, lines


@pytest.fixture(scope="module")
def of_transformers(folder, tasks, tmp_path_factory):
    """lm_eval's own backend on the exported folder: its results, and its logits of tokens."""
    import torch
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other longer than such a model computes
    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    store = tmp_path_factory.mktemp("store") / "datasets"
    with definitions.data_in(store):
        loaded = definitions.load(list(tasks.values()), store)
        given = {name: task for one in loaded for name, task in one.tasks.items()}
        for task in given.values():
            task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=1234)
        found = evaluate(model, {"tasks": given}, bootstrap_iters=0)
    yield model, found
    torch.set_num_threads(threads)


def is_tie(model, context, continuation):
    """Whether two logits of a token of the continuation are so close that rounding decides."""
    import torch

    ids = model._encode_pair(context, continuation) if context else ([exported.END], [])
    whole = sum(ids, []) if context else [*ids[0], *model.tok_encode(continuation)]
    logits = model.model(torch.tensor([whole[:-1][-exported.CONTEXT :]])).logits[0]
    best = logits.topk(2).values
    return bool((best[:, 0] - best[:, 1]).min() < 1e-4)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_request_scores_as_with_transformers(
    folder, tasks, of_transformers, tmp_path, batch_size
):
    from pipeline.tasks.lm_eval_model import LmEvalModel

    model, expected = of_transformers
    ours = LmEvalModel(exported.model(folder))
    results, samples = run(folder, list(tasks.values()), tmp_path, batch_size)
    compared = 0
    for sample in samples:
        [other] = [
            one for one in expected["samples"][sample["task"]] if one["doc_id"] == sample["doc_id"]
        ]
        for key in ("doc_hash", "prompt_hash", "target_hash"):
            assert sample[key] == other[key]
        for given, found, theirs in zip(
            sample["arguments"], sample["resps"], other["resps"], strict=True
        ):
            compared += 1
            if sample["task"] == "writing":
                assert found == theirs
                continue
            found, theirs = found[0], theirs[0]
            assert ours.tok_encode(given[0]) == model.tok_encode(given[0])
            if sample["task"] == "choices":
                assert not given[0] or ours._encode_pair(*given) == model._encode_pair(*given)
                (found, greedy), (theirs, their_greedy) = found, theirs
                assert greedy == their_greedy or is_tie(model, *given)
            assert abs(found - theirs) <= 1e-4 + 1e-5 * abs(theirs)
    assert compared == sum(len(question["c"]) for question in QUESTIONS) + 2 * len(TEXTS)
    for name, result in results.items():
        theirs = expected["results"][name]
        for metric, (value, _) in result.metrics.items():
            assert value == pytest.approx(theirs[f"{metric},none"], rel=1e-4)


def test_what_the_model_would_write_is_greedy(folder, of_transformers):
    from pipeline.tasks.lm_eval_model import LmEvalModel

    model, _ = of_transformers
    ours = LmEvalModel(exported.model(folder))
    context = ours.tok_encode("def f(x)")
    [written] = ours.model.writer(next(iter(ours.model.params_on))).write(
        [context], max_new_tokens=5
    )
    other = [*written[:-1], written[-1] ^ 1]
    requests = [(("", ""), context, continuation) for continuation in (written, other)]
    expected = model._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [greedy for _, greedy in expected] == [True, False]
    assert ours._loglikelihood_tokens(requests) == [
        (pytest.approx(score, abs=1e-4), greedy) for score, greedy in expected
    ]


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
    assert result.source == f"lm_eval {definitions.version()}: allenai/ai2_arc (ARC-Easy)"
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
    with pytest.raises(LockstepError, match=r"\[pins\] tasks = .*, but arc_easy has sha256"):
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

    monkeypatch.setattr(definitions.metadata, "version", absent)
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
    shown.write_text(shown.read_text().replace("50", "6") + "fewshot_split: test\n")
    with pytest.raises(LockstepError, match="its num_fewshot is 6, expected at most 5"):
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
        with definitions.data_in(tmp_path / "store"):
            [loaded] = definitions.load([str(place / "choices.yaml")], tmp_path / "store")
            return definitions.sha256_of(loaded, None)

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


def test_tokens_that_the_model_does_not_have_begin_no_text_and_are_in_none(folder, tmp_path):
    export = tmp_path / "export"
    shutil.copytree(folder, export)
    write_json(export / "tokenizer_config.json", {"bos_token": 5, "eos_token": {"content": [1]}})
    assert exported.model(export).beginning == exported.END
    tokenizer = exported.make_tokenizer()
    tokenizer.add_tokens([f"more{number}" for number in range(272)])
    tokenizer.save(str(export / "tokenizer.json"))
    write_json(export / "tokenizer_config.json", {"bos_token": "more271"})
    with pytest.raises(LockstepError, match="begins with token .*, expected .* vocab_size .272"):
        exported.model(export)
    (export / "tokenizer_config.json").unlink()
    from pipeline.tasks.lm_eval_model import LmEvalModel

    with pytest.raises(LockstepError, match="has token .* in a text, expected .* vocab_size .272"):
        LmEvalModel(exported.model(export)).tok_encode("more271")


def test_lm_eval_knows_the_model_lockstep(folder):
    from lm_eval.api.registry import get_model

    import lockstep.lm_eval  # noqa: F401 - registers it
    from pipeline.tasks.lm_eval_model import LmEvalModel

    given = {"batch_size": "4", "device": "cuda:0"}  # as lm_eval's command line has it
    model = get_model("lockstep").create_from_arg_obj({"pretrained": str(folder)}, given)
    asked = [(("", ""), [5, 6], [7, 8, 9]), (("", ""), [5], [6])]
    expected = LmEvalModel(exported.model(folder))._loglikelihood_tokens(asked)
    assert model._loglikelihood_tokens(asked) == [
        (pytest.approx(log, abs=1e-4), greedy) for log, greedy in expected
    ]


@pytest.mark.soak
def test_lm_evals_own_command_knows_the_model_lockstep(folder, tasks, monkeypatch, capsys):
    import lm_eval

    from lockstep.lm_eval import main

    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    command = f"lm_eval run --model lockstep --model_args pretrained={folder}"
    monkeypatch.setattr(sys, "argv", f"{command} --tasks {tasks['choices']}".split())
    main()
    assert re.search(r"\|choices\|.*\|acc  ", capsys.readouterr().out)
    found = lm_eval.simple_evaluate("lockstep", f"pretrained={folder}", tasks=[tasks["choices"]])
    assert found["results"]["choices"]["sample_len"] == len(QUESTIONS)
    monkeypatch.setattr(sys, "argv", [*sys.argv[:5], "pretrained=nowhere", *sys.argv[6:]])
    with pytest.raises(SystemExit, match="error: .*no such folder"):
        main()


def test_next_line_has_the_same_shares_with_transformers(folder, of_transformers, tmp_path):
    """Its files are a task of lm_eval, for whoever has the exported folder."""
    from lm_eval.evaluator import evaluate

    texts = ["\n".join(f"{a}{n} = return({n})" for n in range(8)) for a in "abcdef"]
    model = exported.model(folder)
    asked = choices.ask(
        next_line.questions(texts), model.tokenizer, model.beginning, model.context, 12
    )
    result, scores = ask_next_line.result(asked, model)
    task_file.write(tmp_path, str(tmp_path), asked, scores)
    with definitions.data_in(tmp_path / "datasets"):
        [loaded] = definitions.load([str(tmp_path / "next_line.yaml")], tmp_path / "datasets")
        found = evaluate(of_transformers[0], {"tasks": loaded.tasks}, bootstrap_iters=0)
    theirs = found["results"]["next_line"]
    assert result.documents == len(found["samples"]["next_line"]) == 12
    assert {name: metric.value for name, metric in result.metrics.items()} == {
        name: pytest.approx(theirs[f"{name},none"]) for name in result.metrics
    }
    for sample, after, alone in zip(
        found["samples"]["next_line"], scores.after_NC, scores.alone_NC, strict=True
    ):
        logs = [float(log) for ((log, _),) in sample["resps"]]
        assert logs == pytest.approx([*after, *alone], abs=1e-3)


def test_stage_evaluate_runs_the_tasks_and_they_can_be_pinned(tasks, tmp_path, monkeypatch):
    made = trained_run.make(
        tmp_path,
        model={"max_position_embeddings": exported.CONTEXT},
        tokenizer={"bos_token": "<|endoftext|>"},
        held_out=False,
        evaluate__tasks=[tasks["choices"]],
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
    made.run.write_text(before_pins.replace('tasks = ""', f'tasks = "{hashes["sha256"]}"'))
    questions = Path(tasks["choices"]).with_suffix(".jsonl")
    before = questions.read_text()
    questions.write_text(before.replace("Which", "What"))
    try:
        with pytest.raises(LockstepError, match=r"^\[pins\] tasks = "):
            stage()
    finally:
        questions.write_text(before)
