"""Scores of next_line: of what was exported, and repeated from what is published."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline import runfile
from pipeline.recheck import evaluate
from pipeline.recheck.evaluate import Evaluated
from tests.errors import refused
from tests.pipeline.evaluated import END, make
from tests.pipeline.exported import make_tokenizer

pytestmark = pytest.mark.long


def test_the_shares_of_next_line_follow_from_the_scores_that_it_leaves(tmp_path):
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


def test_scores_are_repeated_or_refused_and_nothing_of_the_authors_is_run(tmp_path):
    tokenizer = make_tokenizer()
    texts = [
        f"def f{n}(x):\n" + f"    return x + {n} - {n}\n" * 4 + f"y{n} = 1\n" for n in range(30)
    ]
    held_out = [token for text in texts for token in (*tokenizer.encode(text).ids, END)]
    paths, metrics, _ = make(tmp_path, tokenizer=tokenizer, held_out=held_out, questions="25")
    run, export, shards = runfile.load(paths.run), paths.out("export"), paths.out("download")

    def check(said: dict, **changes: object):
        evaluated = Evaluated.model_validate_json(json.dumps(said))
        settings = run.evaluate.model_copy(update=changes)
        other = run.model_copy(update={"evaluate": settings})
        own = SimpleNamespace(tasks=True, shards=shards, store=tmp_path / "store")
        published = SimpleNamespace(run=other, folder=export, own=own)
        return evaluate._scores(published, evaluated)

    [claim] = check(metrics)
    assert (claim.kind, claim.text) == ("proven", "the scores of next_line repeated")
    assert claim.values["scores"] == metrics["tasks"]
    (claim,) = check(metrics | {"tasks": {"next_line": None}})
    assert (claim.kind, claim.values) == ("stated", {"names": []})
    better = metrics["tasks"]["next_line"] | {"acc": 0.99}
    with refused("acc of next_line", 0.99):
        check(metrics | {"tasks": {"next_line": better}})
    with refused("['acc']", "mmlu", "[]"):
        check(metrics | {"tasks": metrics["tasks"] | {"mmlu": {"acc": 0.9}}})
    with refused("theirs.yaml"):
        check(metrics, tasks=("next_line", "theirs.yaml"))
    shards = None
    with refused("--tasks", "next_line", "--shards"):
        check(metrics)
