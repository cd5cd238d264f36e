"""Scores of tasks, repeated from what is published and the reader's own data."""

import json
from types import SimpleNamespace

import pytest

from lockstep.errors import LockstepError
from pipeline import runfile
from pipeline.again import evaluate
from pipeline.again.evaluate import Evaluated
from tests.pipeline.test_evaluate import END, made, make_tokenizer

__all__ = ["made"]  # a fixture


def test_scores_are_repeated_or_refused_and_nothing_of_the_authors_is_run(made, tmp_path):  # noqa: F811
    tokenizer = make_tokenizer()
    texts = [
        f"def f{n}(x):\n" + f"    return x + {n} - {n}\n" * 4 + f"y{n} = 1\n" for n in range(30)
    ]
    held_out = [token for text in texts for token in (*tokenizer.encode(text).ids, END)]
    paths, metrics, _ = made(tokenizer=tokenizer, held_out=held_out, questions="25")
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
    assert check(metrics | {"tasks": {"next_line": None}}) == []
    better = metrics["tasks"]["next_line"] | {"acc": 0.99}
    with pytest.raises(LockstepError, match="acc of next_line is 0.99, expected 0"):
        check(metrics | {"tasks": {"next_line": better}})
    with pytest.raises(LockstepError, match=r"scores \['acc'\] of mmlu, expected \[\]"):
        check(metrics | {"tasks": metrics["tasks"] | {"mmlu": {"acc": 0.9}}})
    with pytest.raises(LockstepError, match="'theirs.yaml' is the author's file"):
        check(metrics, tasks=("next_line", "theirs.yaml"))
    shards = None
    with pytest.raises(LockstepError, match="next_line asks of the held-out text, which is not"):
        check(metrics)
