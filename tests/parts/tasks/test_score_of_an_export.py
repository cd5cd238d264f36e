"""next_line in stage evaluate: what is scored is what was exported."""

import hashlib
import json

import jax
import numpy as np
import pytest

from pipeline.weights import exported as exported_folder
from tests.pipeline.evaluated import END, LENGTH, make
from tests.pipeline.exported import make_tokenizer


def test_next_line_scores_what_the_exported_model_says(tmp_path):
    """Each choice's log-likelihood by the whole model alone, in float64."""
    tokenizer = make_tokenizer()
    texts = ["\n".join(f"{a}{n} = return({n})" for n in range(8)) for a in "abcdef"]
    held_out = [token for text in texts for token in (*tokenizer.encode(text).ids, END)]
    paths, metrics, written = make(tmp_path, tokenizer=tokenizer, held_out=held_out, questions="25")
    folder = paths.out("evaluate") / "tasks"
    asked, scores = (
        [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("next_line.jsonl", "next_line.scores.jsonl")
    )
    assert len(asked) == len(scores) == 25
    exported = exported_folder.read(paths.out("export"))
    apply = jax.jit(exported.apply)
    for question, score in list(zip(asked, scores, strict=True))[::8]:
        for choice, after in zip(question["choices"], score["after"], strict=True):
            before = tokenizer.encode(question["context"]).ids
            ids = tokenizer.encode(question["context"] + choice).ids
            row = np.zeros((1, 2 * LENGTH), np.int32)
            seen = ids[-LENGTH - 1 : -1]
            row[0, : len(seen)] = seen
            logits = np.float64(apply(exported.params, row[:, :LENGTH]))[0, : len(seen)]
            logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            labels = ids[len(before) :]
            expected = logs[np.arange(len(seen) - len(labels), len(seen)), labels].sum()
            assert after == pytest.approx(expected, abs=1e-3)
    (task,) = written["tasks"]
    right = [s["answer"] == int(np.argmax(s["after"])) for s in scores]
    assert metrics["tasks"]["next_line"]["acc"] == task["metrics"]["acc"]["value"] == np.mean(right)
    assert (task["chance"], task["documents"]) == (0.25, 25)
    assert task["sha256"] == hashlib.sha256((folder / "next_line.jsonl").read_bytes()).hexdigest()
    low, high = task["metrics"]["acc"]["interval"]
    assert low < np.mean(right) < high


def test_without_held_out_text_there_are_no_questions(tmp_path, capsys):
    _, metrics, _ = make(tmp_path, tokenizer=make_tokenizer())
    assert metrics["tasks"] == {"next_line": None}
    assert "gives 0 questions for next_line" in capsys.readouterr().out
