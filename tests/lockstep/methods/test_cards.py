"""Each variant of the run file's optimizer and schedule has an engine that takes its keys."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import TypeAdapter

from lockstep.errors import LockstepError
from lockstep.methods import CARDS, AnyOptimizer, card_of
from lockstep.methods.card import OptimizerVariant, Setting, build
from lockstep.methods.dense import OptimizerDummy
from lockstep.methods.distro import OptimizerDistro
from lockstep.methods.schedule import ScheduleVariant, learning_rate_of
from lockstep.optim import schedules
from lockstep.optim.compressed.compressor import SomeBlocks
from lockstep.tables.variant import variants_of
from pipeline import runfile
from tests import tiny
from tests.lockstep.optim.compiled import Peers

GROUPS = ("embed", "layers", "norm", "lm_head")


def setting(**changes) -> Setting:
    return Setting(lambda step: 0.1, 0, ("layers",))._replace(**changes)


@pytest.mark.parametrize("table", variants_of(ScheduleVariant))
def test_a_schedules_keys_are_its_functions_arguments(table, monkeypatch):
    taken = []
    for name, function in inspect.getmembers(schedules, inspect.isfunction):
        monkeypatch.setattr(
            schedules, name, lambda function=function, **keys: taken.append((function, keys))
        )
    learning_rate_of(table.model_construct(**dict.fromkeys(table.model_fields, 1)))
    ((function, keys),) = taken
    assert set(inspect.signature(function).parameters) == set(keys) == set(table.model_fields)


def test_every_method_but_those_of_others_has_a_card():
    kinds = variants_of(OptimizerVariant)
    own = {kind.tag() for kind in kinds if kind.__module__.startswith("lockstep.")}
    assert own - {card.tag for card in CARDS.values()} == {"Dummy"}


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_a_whole_table_that_can_be_built(name):
    card = CARDS[name]
    table = TypeAdapter(AnyOptimizer).validate_python({card.tag: card.settings})
    assert build(table, setting(), GROUPS).inner_steps == card.local_steps == table.steps_of_a_round


@pytest.mark.parametrize("name", CARDS)
def test_every_method_has_steps_by_group(name):
    card, params = CARDS[name], {group: jnp.zeros((8, 6)) for group in "ab"}
    moved = []
    for scale in ({}, {"b": 0.5}):
        settings = card.settings | {"step_scale": scale}
        if "inner" in card.settings:
            ((inner, own),) = card.settings["inner"].items()
            settings = card.settings | {"inner": {inner: own | {"step_scale": scale}}}
        table = TypeAdapter(AnyOptimizer).validate_python({card.tag: settings})
        peers = Peers(build(table, setting(), "ab"), params)
        for step in range(table.steps_of_a_round):
            grads = jax.tree.map(jnp.cos, {"a": 1e-3 + params["a"], "b": params["b"] - step})
            peers.accumulate(0, grads, 1)
        moved.append(peers.receive([peers.send(0, 1)], 1))
    assert float(jnp.abs(moved[0]["b"]).max()) > 0
    np.testing.assert_array_equal(moved[0]["a"], moved[1]["a"])
    np.testing.assert_allclose(0.5 * moved[0]["b"], moved[1]["b"], rtol=0.05)  # decay of its drift


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_found_by_every_spelling_of_its_name(name):
    card = CARDS[name]
    assert card_of(name) is card_of(name.replace("-", "_").upper()) is card
    assert name == "demo" or card_of(card.tag) is card
    assert card_of(f"{name}x") is None


@pytest.mark.parametrize("file", tiny.READY_RUNS, ids=lambda f: f.name)
def test_the_optimizer_of_every_ready_run_can_be_built(file):
    build(runfile.load(file).llm.optimizer, setting(), GROUPS)


@pytest.mark.parametrize(
    "table, changes",
    [(OptimizerDummy(), {}), (CARDS["adamw"], {"overlap": 1}), (CARDS["muon"], {"groups": ()})],
    ids=["no optimizer", "overlap", "unknown group"],
)
def test_what_cannot_be_built_is_refused_by_its_name(table, changes):
    if not isinstance(table, OptimizerVariant):
        table = TypeAdapter(AnyOptimizer).validate_python({table.tag: table.settings})
    groups = changes.pop("groups", GROUPS)
    with pytest.raises(LockstepError, match=rf"model.LLM.optimizer.{table.tag()}"):
        build(table, setting(**changes), groups)


@pytest.mark.parametrize("skip", [None, False, True])
def test_blocks_of_zeros_are_skipped_only_where_a_run_asks_for_it(skip):
    table = OptimizerDistro(**CARDS["distro"].settings, skip_zero_blocks=skip)
    params = {"w": jax.ShapeDtypeStruct((8, 16), "float32")}
    areas = build(table, setting(stacked=()), ()).areas(params)
    assert areas == {"w": SomeBlocks(0, 128) if skip else 128}
