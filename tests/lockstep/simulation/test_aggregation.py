"""Peers that merge by another rule than the mean: what a liar does to them, and what is refused."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.optim.dense import sgd
from tests.errors import refused
from tests.lockstep.simulation.least_squares import SGD

pytestmark = pytest.mark.usefixtures("one_device")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 16)).astype(np.float32)
TRUTH = RNG.normal(size=16).astype(np.float32)
DATA = {"x": X, "y": X @ TRUTH}
PARAMS = {"w": np.zeros(16, np.float32)}
DILOCO = {"DiLoCo": {"inner_steps": 2, "inner": SGD, "outer_momentum": 0.5}}
SPARSELOCO = {"SparseLoCo": {"inner_steps": 2, "inner": SGD}}
SIGNS = {"Distro": {"compression_topk": 2, "compression_chunk": 16}}
VALUES = {"Distro": {**SIGNS["Distro"], "quantize_1bit": False}}
SHORT = {"inner_steps": 1, "fragments": 1, "delay": 0, "inner": SGD, "max_age": 0}
KRUM = {"aggregation": "multi_krum", "liars": 1}
LONE_INDEX = [{"kind": "lone_index", "peer": 1, "rounds": [1, 1]}]
NEEDS = ("trimmed_mean", "min_support", "multi_krum")


def squares(params, batch, rng):
    del rng
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


simulate = partial(
    lockstep.simulate, squares, PARAMS, DATA, peers=5, steps=12, batch_size=4, show_progress=False
)


def off(optimizer, rule: str, lie: str | None = None, **given) -> float:
    """The distance from the truth where peers end, of which one lies from the first round on."""
    size = {"size": 20.0} if lie == "noise" else {}
    faults = [{"kind": lie, "peer": 3, "rounds": [1, 12], **size}] if lie else []
    needed = {"liars": 1} if rule in NEEDS else {}
    result = simulate(optimizer=optimizer, aggregation=rule, faults=faults, **needed, **given)
    return float(np.linalg.norm(result.params["w"] - TRUTH))


@pytest.mark.long
@pytest.mark.parametrize("rule", ["median", "trimmed_mean", "multi_krum", "centered_clip"])
def test_diloco_bears_a_liar_by_a_robust_rule_and_not_by_the_mean(rule):
    run = partial(off, DILOCO, learning_rate=0.05)
    assert run(rule, "noise") < 0.5 * run("mean", "noise")
    assert run(rule) < 0.5 * np.linalg.norm(TRUTH)


@pytest.mark.parametrize("rule", ["norm_clip", "rda", "rda_median_norm"])
def test_the_other_rules_train(rule):
    assert off(DILOCO, rule, learning_rate=0.05) < 0.5 * np.linalg.norm(TRUTH)


@pytest.mark.long
def test_elements_that_a_liar_alone_sends_are_its_own_but_for_the_rules_against_it():
    run = partial(off, SIGNS, learning_rate=0.1)
    alone = {rule: run(rule, "lone_index") for rule in ("mean", "min_support", "peer_mean")}
    assert alone["min_support"] < alone["mean"]


def test_workers_gradients_are_merged_by_the_rule_too():
    given = {"learning_rate": 0.05, "rule": "median"}
    assert off("sgd", lie="noise", **given) < 0.7 * np.linalg.norm(TRUTH)


def test_time_and_bytes_follow_the_topology_and_nothing_else_does():
    given = {"upload_mbps": 0.001, "download_mbps": 0.001, "latency_seconds": 0.0}
    found = {
        topology: simulate(
            optimizer=DILOCO, learning_rate=0.05, links=given | {"topology": topology}
        )
        for topology in ("broadcast", "hub", "ring")
    }
    seen = {name: result.train for name, result in found.items()}
    size = seen["broadcast"]["bytes_up"][-1]
    assert seen["broadcast"]["bytes_down"][-1] == 4 * size
    assert (seen["hub"]["bytes_up"][-1], seen["hub"]["bytes_down"][-1]) == (size, size)
    ring = seen["ring"]["bytes_up"][-1], seen["ring"]["bytes_down"][-1]
    assert ring == (pytest.approx(1.6 * size),) * 2
    seconds = {name: rows["link_seconds"][-1] for name, rows in seen.items()}
    assert seconds["ring"] < seconds["hub"] < seconds["broadcast"]
    for result in found.values():
        np.testing.assert_array_equal(result.params["w"], found["hub"].params["w"])


WRONG = [  # what is changed; what the error names
    ({"aggregation": "krum"}, "aggregation", "krum", "peer_mean"),
    ({"aggregation": "median", "liars": 1}, "liars", 1, "median"),
    ({"aggregation": "trimmed_mean"}, "liars", "trimmed_mean"),
    ({"aggregation": "min_support", "liars": 1}, "aggregation", "min_support", "DiLoCo"),
    ({"aggregation": "peer_mean", "optimizer": SPARSELOCO}, "aggregation", "SparseLoCo"),
    ({"aggregation": "median", "optimizer": "decoupled_diloco"}, "aggregation", "old"),
    ({**KRUM, "optimizer": "decoupled_diloco"}, "aggregation", "multi_krum", "max_age", 2),
    ({**KRUM, "optimizer": {"DecoupledDiLoCo": {**SHORT, "quorum": 4}}}, "quorum", 4, "least 5"),
    ({"aggregation": "multi_krum", "liars": 2}, "aggregation", "at least 7", "liars = 2", 5),
    ({"aggregation": "trimmed_mean", "liars": 3}, "aggregation", "at least 7", "liars = 3"),
    ({**KRUM, "optimizer": SPARSELOCO}, "aggregation", "elements"),
    ({**KRUM, "optimizer": VALUES}, "aggregation", "Distro"),
    ({"aggregation": "rda", "optimizer": VALUES}, "aggregation", "Distro", "length"),
    ({"aggregation": "norm_clip", "optimizer": SIGNS}, "aggregation", "quantize_1bit"),
    ({"aggregation": "min_support", "liars": 5, "optimizer": SIGNS}, "aggregation", "at least 6"),
    ({"liars": 1, "optimizer": sgd(0.1)}, "liars", 1, "Optimizer"),
    ({"aggregation": "median", "optimizer": sgd(0.1)}, "aggregation", "median", "Optimizer"),
    ({"links": {"topology": "hub"}, "optimizer": SPARSELOCO}, "links.topology", "SparseLoCo"),
    ({"links": {"topology": "ring"}, "aggregation": "median"}, "links.topology", "ring", "median"),
    ({"links": {"topology": "hub"}, "optimizer": sgd(0.1)}, "links.topology", "hub", "Optimizer"),
    ({"faults": LONE_INDEX}, "faults[0].kind", "lone_index", "whole arrays"),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: "-".join(map(str, row[1:]))[:40])
def test_a_rule_that_does_nothing_is_refused_in_one_line(row):
    changes, *named = row
    with refused("simulate", *named):
        simulate(**{"optimizer": DILOCO} | changes)


def test_krum_goes_with_late_peers_whose_late_messages_are_dropped():
    optimizer = {"DecoupledDiLoCo": {**SHORT, "quorum": 5}}
    result = simulate(optimizer=optimizer, steps=1, **KRUM)
    assert result.train["applied"].tolist() == [5]
