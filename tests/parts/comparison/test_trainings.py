"""What a comparison trains: equal tokens, seeds and faults for all, and a search alike for all."""

import math

import pytest

from parts.comparison import compare_file, search
from parts.comparison.training_result import TRAINED
from parts.comparison.trainings import (
    Decided,
    PlannedTraining,
    changed,
    decided,
    document,
    needed,
    trainings,
)
from pipeline import runfile
from pipeline.runfile.tables import Peers
from pipeline.stage.keys import PROJECT
from tests.errors import refused
from tests.parts.comparison.examples import BASE, LIAR, PLAIN, compared, made

pytestmark = pytest.mark.long

READY = sorted(path.name for path in (PROJECT / "params").glob("compare*.toml"))


@pytest.mark.parametrize("file", READY)
def test_every_training_of_a_ready_comparison_is_a_run_of_the_same_tokens(file):
    """But for what a whole number of rounds leaves; each with the seed and rate it is named for."""
    compare = compare_file.load(PROJECT / "params" / file)
    base = runfile.load(PROJECT / compare.base)
    alike = {one[:1] + (one.trial is None,) + one[2:]: one for one in trainings(compare)}
    for one in alike.values():  # trainings of a search begin as one
        method = compare.methods[one.method]
        found = Decided(method.search, 2.2 if one.failure != "none" else None)
        run = runfile.parse(document(compare, base, one, found), one.label)
        if one.failure != "none":
            assert run.config.max_round_train_time == 5  # twice as long, in whole seconds
            if method.grace is not None:
                assert run.llm.optimizer.grace_seconds == method.grace * 2.2
        scored = one.trial is None
        assert run.held_out.rows == ("scoring" if scored else "tuning")
        assert run.held_out.stop_above > 1000  # or only one with a curve would be stopped early
        has_curve = scored and one.failure == "none"
        assert (run.held_out.every == run.config.total_steps) == (not has_curve)
        length = run.llm.max_seq_len
        a_round = run.config.last_index(length) * length / run.config.total_steps
        assert abs(run.config.last_index(length) * length - compare.tokens) <= a_round / 2, one
        assert run.llm.lr_schedule.base_lr == method.search["rate"]
        assert (run.llm.checkpoint.seed, run.peers.seed) == (one.seed, one.seed)
        assert run.llm.data_location.shuffle.seed[0] == one.seed
        peers = base.peers.model_dump() | compare.peers | method.peers | {"seed": one.seed}
        assert run.peers == Peers.model_validate(peers)
        assert run.config.init_min_clients == run.peers.count


def test_each_training_comes_after_those_that_decide_it():
    compare = compared(failures={"liar": {"faults": [LIAR]}})
    planned = list(trainings(compare))
    assert planned == [
        PlannedTraining("a", 0, 9),
        PlannedTraining("a", 1, 9),
        PlannedTraining("a", None, 3),
        PlannedTraining("a", None, 4),
        PlannedTraining("a", None, 3, "liar"),
        PlannedTraining("a", None, 4, "liar"),
    ]
    assert [len(needed(compare, one)) for one in planned] == [0, 1, 2, 2, 3, 3]
    result = made(4.0)[0] | {TRAINED: 30.0, "rounds": 10}
    found = decided(compare, planned[-1], [result, made(5.0)[0], result])
    assert found == Decided({"rate": 1e-3}, 3.0)  # the second is worse
    assert decided(compare, planned[1], [result]).values == {"rate": 2e-3}
    longer = compared(tuning={"seed": 9, "trainings": 4})
    bracketed = [result, made(5.0)[0], made(None)[0]]
    assert decided(longer, PlannedTraining("a", 3, 9), bracketed) is None
    skipped = [*bracketed, {"loss": None}]
    assert decided(longer, PlannedTraining("a", None, 3), skipped).values == {"rate": 1e-3}
    stated = compared(tuning={"seed": 9})
    assert [one.trial for one in trainings(stated)] == [None, None]
    assert decided(stated, PlannedTraining("a", None, 3), []) == Decided({"rate": 1e-3})


def losses_of_a_search(start: dict, loss, most: int) -> list:
    """The losses of a search of at most so many trainings; None: one diverged."""
    losses: list = []
    while len(losses) < most:
        if (point := search.next_point(start, search.searched(start, losses))) is None:
            break
        losses.append(loss(search.values(start, point)))
    return losses


def test_a_search_ends_where_twice_and_half_of_each_value_are_no_better():
    """By hand: the rate goes 1, 2, 4, 8 (worse); layers 0.2 (worse), 0.05, 0.025 (worse); the
    momentum 0.75 and 0 lacking 1 (no value); the rate again at the new layers, 8 and 2."""
    start = {"rate": 1.0, "step_scale.layers": 0.1, "outer_momentum": 0.5}

    def loss(at):
        far = abs(math.log2(at["rate"] / 4)) + abs(math.log2(at["step_scale.layers"] / 0.05))
        return None if at["rate"] > 6 else far + at["outer_momentum"]

    losses = losses_of_a_search(start, loss, 99)
    tried = search.searched(
        start, [*losses, None, None]
    )  # what was not needed is no training of it
    got = search.found(start, tried)
    assert got.values == start | {"rate": 4.0, "step_scale.layers": 0.05}
    assert (got.tuned, got.edges) == ([*start], []) and len(tried) == len(losses) == 10
    assert [one["rate"] for one in got.tried] == [1, 2, 4, 8, 4, 4, 4, 4, 8, 2]
    assert [one["best"] for one in got.tried].index(True) == 5
    for key in start:
        for factor in (0.5, 2.0):
            if key != "outer_momentum":
                assert (loss(got.values | {key: got.values[key] * factor}) or math.inf) > 0.5


@pytest.mark.parametrize(("most", "edges"), [(1, []), (2, ["rate"]), (3, ["rate"]), (4, [])])
def test_a_best_that_has_nothing_beyond_it_is_at_an_edge_and_what_was_not_moved_is_stated(
    most, edges
):
    start = {"rate": 1.0, "step_scale.layers": 0.1}
    losses = losses_of_a_search(start, lambda at: abs(math.log2(at["rate"] / 0.5)), most)
    got = search.found(start, search.searched(start, losses))
    assert (len(losses), got.edges) == (most, edges)
    assert got.tuned == ([] if most == 1 else ["rate"])


@pytest.mark.parametrize(
    ("recipe", "key", "start"),
    [
        ("sparseloco", "error_feedback", 0.95),
        ("distro", "compression_decay", 0.999),
        ("streaming-diloco", "mixing", 0.5),
        ("sparta", "share", 0.3),
        ("adamw", "weight_decay", 0.75),
    ],
)
def test_what_is_below_1_stays_so_in_a_search_that_goes_up(recipe, key, start):
    method = {"recipe": recipe, "search": {"rate": 1e-3, key: start}}
    compare = compared(methods={"a": method})
    tried: dict = {}
    for _ in range(30):
        if (point := search.next_point(method["search"], tried)) is None:
            break
        found = Decided(search.values(method["search"], point))
        document(compare, BASE, PlannedTraining("a", 0, 9), found)  # it is a run
        tried[point] = -found.values[key]
    assert (max(-loss for loss in tried.values()) > 1) == (key == "weight_decay")


def test_values_that_are_searched_are_keys_of_the_settings():
    inner = "inner.AdamW.step_scale.layers"
    method = {"recipe": "diloco", "search": {"rate": 1e-3, inner: 0.5, "outer_momentum": 0.5}}
    compare = compared(methods={"a": method})
    found = Decided({"rate": 2e-3, inner: 0.25, "outer_momentum": 0.75})
    run = runfile.parse(document(compare, BASE, PlannedTraining("a", None, 3), found), "a")
    optimizer = run.llm.optimizer
    assert (optimizer.inner.step_scale, optimizer.outer_momentum) == ({"layers": 0.25}, 0.75)
    assert run.llm.lr_schedule.base_lr == 2e-3


def test_a_failure_is_of_the_same_share_of_the_rounds_whatever_their_number():
    failure = {"faults": [LIAR], "slower": {"2": 2.0}}
    method = {"recipe": "diloco", "search": {"rate": 1e-3}}
    compare = compared(methods={"a": PLAIN, "b": method}, failures={"bad": failure})
    start = Decided({"rate": 1e-3})
    for name, first, last in (("a", 101, 200), ("b", 11, 20)):
        tables = document(compare, BASE, PlannedTraining(name, None, 3, "bad"), start)
        (fault,) = runfile.parse(tables, "bad").faults.schedule
        assert (fault.kind, fault.peer, fault.size) == ("scale_up", 1, 4.0)
        assert fault.rounds == (first, last)
        speeds = tables["links"]["tokens_per_second"]
        assert speeds[2] * 2 == speeds[0] == speeds[1] == speeds[3]
    with refused("slower.9", 3):
        nine = compared(failures={"bad": {"slower": {"9": 2.0}}})
        document(nine, BASE, PlannedTraining("a", None, 3, "bad"), start)


@pytest.mark.parametrize(
    ("key", "start"),
    [("rate", 0.0), ("weight_decay", 0.0), ("outer_momentum", 0.0), ("error_feedback", 1.0)],
)
def test_a_search_begins_where_there_is_more_and_less(key, start):
    with refused(f"methods.a.search.{key}", start, 0):
        compared(methods={"a": {"recipe": "diloco", "search": {"rate": 1e-3, key: start}}})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"methods": {"a": PLAIN | {"search": {"outer_momentum": 0.5}}}}, "methods.a.search"),
        ({"methods": {"a": PLAIN | {"peers": {"count": 8}}}}, "methods.a.peers.count"),
        ({"peers": {"seed": 1}}, "peers.seed"),
        ({"tuning": {"seed": 4}}, "tuning.seed"),
        ({"failures": {"none": {}}}, "failures.none"),
        ({"seeds": [256]}, "seeds[0] is 256"),
        ({"pairs": [["a", "b"]]}, "pairs"),
        ({"pairs": [["a", "a"]]}, "pairs[0]"),
        ({"failures": {"x": {"faults": [LIAR | {"kind": "sleep"}]}}}, "kind"),
        ({"failures": {"x": {"faults": [LIAR | {"end": 0.5}]}}}, "more than start"),
    ],
)
def test_a_wrong_key_is_one_line_that_names_it(changes, expected):
    with refused(expected):
        compared(**changes)


@pytest.mark.parametrize(
    ("recipe", "changes", "named"),
    [
        ("adamw", {"settings": {"momentum": 2.0}}, ("momentum",)),
        ("diloco", {"settings": {"inner_steps": 0}}, ("inner_steps", 0)),
        ("diloco", {"settings": {"inner_steps": "10"}}, ("inner_steps", "10")),
        ("diloco", {"search": {"rate": 1e-3, "inner_steps": 10}}, ("inner_steps", 10.0)),
        ("streaming-diloco", {"settings": {"fragments": 0}}, ("fragments", 0)),
        ("adamw", {"search": {"rate": 1e-3, "betas.1": 0.5}}, ("search.betas.1",)),
        ("muon", {"search": {"rate": 1e-3, "momentum.x": 0.5}}, ("search.momentum.x",)),
    ],
)
def test_settings_are_checked_before_anything_is_counted_by_them(recipe, changes, named):
    compare = compared(methods={"wrong": PLAIN | {"recipe": recipe} | changes})
    start = Decided(compare.methods["wrong"].search)
    with refused("methods.wrong", *named):
        document(compare, BASE, PlannedTraining("wrong", None, 3), start)


def test_a_pin_of_fresh_weights_is_no_pin_of_another_seeds():
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["pins"] = {"checkpoint": "a" * 64, "data": "b" * 64}
    base, start = runfile.parse(tables, "x"), Decided({"rate": 1e-3})
    made = document(compared(), base, PlannedTraining("a", None, 3), start)
    assert made["pins"] == {"checkpoint": "", "data": "b" * 64, "tasks": ""}


def test_a_base_that_holds_no_text_out_has_nothing_to_compare_by():
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["held_out"]["sequences"] = 0
    with refused("params/run.toml", "held_out.sequences", 0):
        changed(runfile.parse(tables, "x"), compared())


def test_a_key_that_the_bases_config_lacks_is_refused_since_it_would_change_nothing():
    with refused("config.hidden_sizes", "params/run.toml", "hidden_size,"):
        changed(BASE, compared(config={"hidden_sizes": 256}))
    assert changed(BASE, compared(config={"hidden_size": 256})) != BASE
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["model"]["LLM"]["checkpoint"] = {"Hub": {"repo_id": "a/b"}}
    with refused("config.hidden_size", "params/run.toml", "none"):
        changed(runfile.parse(tables, "x"), compared(config={"hidden_size": 256}))


def test_a_base_that_learns_nothing_has_no_rates_to_follow():
    tables = BASE.model_dump(mode="json", exclude_none=True)
    tables["model"]["LLM"]["lr_schedule"]["Cosine"]["base_lr"] = 0.0
    with refused("base_lr", 0):
        start = Decided({"rate": 1e-3})
        document(compared(), runfile.parse(tables, "x"), PlannedTraining("a", None, 3), start)


def test_a_wrong_value_of_the_comparison_is_not_blamed_on_its_base():
    with refused("comparison's", "peers.threads", "0"):
        changed(BASE, compared(peers={"threads": 0}))
