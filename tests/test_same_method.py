"""One word means one method: in `simulate`, in `lockstep new` and in a comparison."""

import inspect

import pytest
from pydantic import TypeAdapter

import lockstep
from lockstep.methods import CARDS, AnyOptimizer
from lockstep.simulation.arguments import read_arguments
from lockstep.tables.validation import validate
from parts.comparison.compare_file import Compare
from parts.comparison.trainings import Decided, PlannedTraining, document
from parts.new import run_tables
from parts.new.starting_model import model_named
from pipeline import runfile
from pipeline.stage.keys import PROJECT


@pytest.mark.parametrize("name", CARDS)
def test_all_three_have_the_same_optimizer_and_its_rate_for_the_smallest_model(name):
    given = inspect.signature(lockstep.simulate).parameters
    given = {key: argument.default for key, argument in given.items()}
    given |= {"optimizer": name.replace("-", "_"), "peers": 4, "steps": 2, "batch_size": 1}
    groups = ("embed", "layers", "lm_head", "norm")
    answers = {"data": "corpus", "optimizer": name, "tokens": "1e6", "peers": 4, "gpus": 0}
    run = run_tables.new_run(answers, model_named("init:2m", PROJECT))
    new = run_tables.tables(run)["model"]["LLM"]
    methods = {"a": {"recipe": name, "search": {"rate": 1e-3}}}
    content = {"base": "params/run.toml", "tokens": 819_200, "seeds": [3], "methods": methods}
    content["tuning"] = {"seed": 99}
    compare, base = validate(Compare, content, ""), runfile.load(PROJECT / "params/run.toml")
    one = PlannedTraining("a", None, 3)
    other = document(compare, base, one, Decided({"rate": 1e-3}))["model"]["LLM"]
    read = TypeAdapter(AnyOptimizer).validate_python
    table = read(new["optimizer"])
    if table.sends != "arrays" or getattr(table, "inner", table).needs_layers:
        given |= {"stacked": ("layers",)}
    simulated = read_arguments(given, groups, torch=False)
    assert table == read(other["optimizer"]) == simulated.optimizer
    assert new["lr_schedule"]["Cosine"]["base_lr"] == simulated.learning_rate.base_lr
