"""Rounds in one program, layout "rounds": what programs of a round each give, to the bit."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep import LockstepError
from lockstep.swarm.peers import SimulatedPeers
from lockstep.swarm.scanned_peers import ScannedPeers
from lockstep.transcript.transcript import RoundsFile
from tests.errors import refused
from tests.lockstep.simulation.least_squares import (
    DATA,
    DILOCO,
    DISTRO,
    PARAMS,
    SGD,
    same,
    simulate,
    squares,
)

pytestmark = pytest.mark.usefixtures("one_device")

SPARSELOCO = {"SparseLoCo": {"inner_steps": 2, "inner": SGD}}  # Rice-coded, as DisTrO's
INT8 = {"DiLoCo": DILOCO["DiLoCo"] | {"quantize": "int8", "quantize_block": 2}}
MARKED = slice(24, 36)  # examples of round 3 of 3 peers


def loss(params, batch, rng):
    """Least squares with a push on "b" by the marks of examples."""
    return squares(params, batch, rng) + jnp.sum(batch["mark"]) * params["b"]


def of_matrices(params, batch, rng):
    first, second = params["layers"]
    return jnp.mean(((batch["x"] @ first @ second).sum(axis=1) - batch["y"]) ** 2)


def rounds_of(optimizer=SGD, steps=9, *, mark=0.0, by=loss, **given):
    """A simulation by rules, in which peer 1 alone has examples that are marked."""

    def examples(peer, peers, split):
        data = {name: np.concatenate([x] * 10) for name, x in DATA.items()}
        data["mark"] = np.zeros(len(data["x"]), np.float32)
        if split == "train" and peer == 1:
            data["mark"][MARKED] = mark
        return data

    settings = {"peers": 2, "batch_size": 4, "micro_batch": 4, "learning_rate": 0.1}
    settings |= {"eval_every": 4, "params": PARAMS, "shuffle": False, "bits": "everywhere"}
    return simulate(by, train_data=examples, optimizer=optimizer, steps=steps, **settings | given)


@pytest.fixture
def taken(monkeypatch):
    """Rounds whose steps were dispatched one by one, and the rounds of each block."""
    steps, blocks = [], []
    plan, step = ScannedPeers.plan, SimulatedPeers.step

    def planned(self, rounds, before):
        blocks.append([planned.round.step for planned in rounds])
        return plan(self, rounds, before)

    def stepped(self, given):
        steps.append(given.number)
        return step(self, given)

    monkeypatch.setattr(ScannedPeers, "plan", planned)
    monkeypatch.setattr(SimulatedPeers, "step", stepped)
    return steps, blocks


def soak(*values):
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    ("optimizer", "given"),
    [
        (DILOCO, {}),
        (SPARSELOCO, {"correlation_every": 3}),
        soak(DISTRO, {}),
        soak(INT8, {}),
        soak({"AdamW": {}}, {"micro_batch": 2}),
        soak({"SPARTA": {"inner_steps": 2, "share": 0.3, "inner": SGD}}, {"correlation_every": 3}),
        soak(
            {"Muon": {}},
            {
                "params": {"layers": np.eye(3, dtype=np.float32)[None].repeat(2, 0)},
                "stacked": ("layers",),
                "by": of_matrices,
            },
        ),
    ],
    ids=["diloco", "sparseloco", "distro", "int8", "adamw", "sparta", "muon"],
)
def test_rounds_in_one_program_have_the_bits_of_a_program_for_each_peer(taken, optimizer, given):
    steps, blocks = taken
    each = rounds_of(optimizer, **given)
    assert (len(steps), blocks) == (9, [])
    rounds = rounds_of(optimizer, layout="rounds", **given)
    assert same(rounds, each) and rounds.curves.correlation == each.curves.correlation
    measured = given.get("correlation_every", 9)
    ends = sorted({9, 4, 8, *range(measured, 10, measured)})
    assert [block[-1] for block in blocks] == ends
    assert [step for block in blocks for step in block] == [*range(1, 10)]
    assert len(steps) == 9, "nothing was computed again"


@pytest.mark.parametrize(
    ("mark", "why"), [(np.nan, "not finite"), (1e12, "beyond the bound of the others")]
)
def test_where_a_peer_fails_the_rounds_are_those_without_a_plan(taken, mark, why):
    steps, blocks = taken
    each = rounds_of(steps=13, mark=mark, peers=3)
    assert each.train["applied"].tolist() == [3, 3, *[2] * 8, 3, 3, 3], why
    steps.clear()
    assert same(rounds_of(steps=13, mark=mark, peers=3, layout="rounds"), each)
    assert steps == [1, 2, 3, *range(4, 12)]
    assert blocks == [[1, 2, 3, 4], [5, 6, 7, 8], [12], [13]]


def test_who_is_late_is_planned_to_be(taken):
    steps, blocks = taken
    given = {"links": {"tokens_per_second": [1e6, 1e-3]}, "steps": 3}
    each = rounds_of(**given)
    assert each.train["applied"].tolist() == [1, 1, 1]
    assert same(rounds_of(**given, layout="rounds"), each)
    assert (steps, blocks) == ([1, 2, 3] * 2, [])


def test_what_counts_in_a_loss_is_counted_ahead(taken):
    def weighed(params, batch, rng):
        error = (batch["x"] @ params["w"] - batch["y"]) ** 2
        counts = batch["x"][:, 0] > 0
        return jnp.sum(error * counts), jnp.sum(counts)

    each = rounds_of(by=weighed, steps=6)
    assert len(taken[0]) == 6
    assert same(rounds_of(by=weighed, steps=6, layout="rounds"), each)
    assert (len(taken[0]), taken[1]) == (6, [[1, 2, 3, 4], [5, 6]])


def test_killed_rounds_resume_bit_for_bit_and_have_no_commitments(tmp_path, taken):
    each = rounds_of()

    def kill(row):
        if row["step"] == 5:
            raise KeyboardInterrupt

    given = {"layout": "rounds", "checkpoint_dir": tmp_path, "checkpoint_every": 3}
    with pytest.raises(KeyboardInterrupt):
        rounds_of(on_round=kill, **given)
    assert taken[1] == [[1, 2, 3], [4], [5, 6], [7, 8]]
    taken[1].clear()
    assert same(rounds_of(**given), each)
    assert taken[1] == [[4], [5, 6], [7, 8], [9]]
    path = tmp_path / "rounds.jsonl"
    sent = json.loads(path.read_text().splitlines()[0])["evidence"]["messages"]["0"]
    assert sent["commitment"] == ""
    with pytest.raises(LockstepError, match=r"rounds.jsonl:1: .*commitment is .., expected 64"):
        RoundsFile(path).cut(9)  # as a transcript is read


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"bits": "machine"}, ["layout", "rounds", "machine"]),
        ({"faults": [{"kind": "crash", "peer": 1, "rounds": [2, 2]}]}, ["faults", "crash", "none"]),
        ({"verification_percent": 50}, ["verification_percent", "50", "rounds"]),
    ],
)
def test_what_no_plan_knows_is_refused(given, named):
    with refused(*named):
        rounds_of(layout="rounds", **given)
