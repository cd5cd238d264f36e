"""lm-evaluation-harness on our model scores as its own backend for transformers does.

One file, because its tests share that backend's results.
"""

import shutil

import pytest

from lockstep.files import write_json
from parts.tasks import lm_eval_tasks, next_line, next_line_task, two_parts
from tests.parts.tasks import exported
from tests.parts.tasks.harness.local_tasks import QUESTIONS, TEXTS, run


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
    with lm_eval_tasks.data_in(store, trusted=True):
        loaded = lm_eval_tasks.load(list(tasks.values()), store, trusted=True)
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
    from parts.tasks.lm_eval import LmEvalModel

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
                parts = two_parts.in_two_parts(ours.tok_encode, exported.END, given[0], given[1:])
                assert not given[0] or parts == [model._encode_pair(*given)]
                (found, greedy), (theirs, their_greedy) = found, theirs
                assert greedy == their_greedy or is_tie(model, *given)
            assert abs(found - theirs) <= 1e-4 + 1e-5 * abs(theirs)
    assert compared == sum(len(question["c"]) for question in QUESTIONS) + 2 * len(TEXTS)
    for name, result in results.items():
        theirs = expected["results"][name]
        for metric, (value, _) in result.metrics.items():
            assert value == pytest.approx(theirs[f"{metric},none"], rel=1e-4)


def test_a_text_stops_at_special_tokens_and_at_every_end_of_the_folder(folder, tmp_path):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from parts.tasks.lm_eval import LmEvalModel

    def texts(model, until):
        settings = {"until": until, "max_gen_toks": 20, "do_sample": False}
        asked = [Instance("generate_until", {}, (text, settings), 0) for text in ("def f(x", "re")]
        return [model.generate_until([one])[0] for one in asked]

    ours, written = LmEvalModel(exported.model(folder)), []
    for prompt in ("def f(x", "re"):
        written += ours.model.writer(next(iter(ours.model.params_on))).write(
            [ours.tok_encode(prompt)], max_new_tokens=20
        )[0][3:]
    tokenizer = exported.make_tokenizer()
    stop, end, *_ = (token for token in written if tokenizer.decode([token]).isalnum())
    stop_text = tokenizer.decode([stop])
    plain = texts(ours, [])
    export = tmp_path / "export"
    shutil.copytree(folder, export)
    tokenizer.add_special_tokens([stop_text])
    tokenizer.save(str(export / "tokenizer.json"))
    for until, ends in (([stop_text], [exported.END]), ([], [exported.END, end])):
        write_json(export / "generation_config.json", {"eos_token_id": ends})
        theirs = HFLM(pretrained=str(export), dtype="float32", device="cpu", batch_size=1)
        found = texts(LmEvalModel(exported.model(export)), until)
        assert found == texts(theirs, until)
        assert any(len(text) < len(whole) for text, whole in zip(found, plain, strict=True))


def test_next_line_has_the_same_shares_with_transformers(folder, of_transformers, tmp_path):
    """Its files are a task of lm_eval, for whoever has the exported folder."""
    from lm_eval.evaluator import evaluate

    texts = ["\n".join(f"{a}{n} = return({n})" for n in range(8)) for a in "abcdef"]
    model = exported.model(folder)
    asked = next_line_task.ask(next_line.questions(texts), model, 12)
    result, scores = next_line_task.result(asked, model)
    next_line_task.write(tmp_path, str(tmp_path), asked, scores)
    names, store = [str(tmp_path / "next_line.yaml")], tmp_path / "datasets"
    with lm_eval_tasks.data_in(store, trusted=True):
        [loaded] = lm_eval_tasks.load(names, store, trusted=True)
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
