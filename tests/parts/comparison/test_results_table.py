"""The table of a comparison: what it computes from results, and what it says was shown."""

import math

import pytest

from parts.comparison.results_table import (
    at_equal_loss,
    conclusions,
    failure_costs,
    made_of,
    reached,
    record,
    row_pairs,
    rows,
    tables,
    unbeaten,
    whole_gradients,
)
from parts.comparison.training_result import TRAINED
from parts.comparison.trainings import PlannedTraining, by_seed, trainings
from tests.parts.comparison.examples import BASE, LIAR, PLAIN, compared, made, row


def test_a_curve_reaches_a_loss_on_the_line_between_two_measures():
    (result,) = made(4.0)
    assert reached(result["curve"], 4.5) == {
        "tokens": 150,
        "bytes_up": 15,
        TRAINED: 1.5,
        "loss": 4.5,
    }
    assert reached(result["curve"], 3.9) is None
    at_most = [{"tokens": 100 * i, "loss": loss} for i, loss in enumerate((3.0, 3.1, 3.1, 2.9))]
    assert reached(at_most, 3.4)["tokens"] == 0  # it begins there
    assert reached(at_most, 2.95)["tokens"] == pytest.approx(275)


def test_what_the_best_with_whole_gradients_needs_for_a_rows_loss():
    """By hand: it has 4.0 and 4.2 in 200 tokens; the row's mean of 4.6 is half way from 5.1 to 4.1;
    its seeds' 4.5 and 4.7 are half way to the reference's own."""
    dense = row("dense", 4.0, 4.2, bytes_up=400)  # as 100 params have in each of its 8 steps
    later, few = row("later", 4.3, 4.4, bytes_up=400), row("few", 4.5, 4.7)
    lost, best = row("lost", None, 4.0, bytes_up=400), row("best", 3.9, 3.8)
    dense, later, lost = (
        one._replace(seeds=tuple(seed | {"bytes_up": 400} for seed in one.seeds))
        for one in (dense, later, lost)
    )
    table = [best, dense, later, few, lost]
    assert whole_gradients(table) is dense and whole_gradients([best, few]) is None
    found = at_equal_loss(few, dense)
    assert found["equal_loss_tokens"] == pytest.approx(150)
    assert found["equal_loss_tokens_ratio"] == pytest.approx(0.75)
    assert found["equal_loss_bytes_up_ratio"] == pytest.approx(600 / 20)
    assert found[f"equal_loss_{TRAINED}_ratio"] == pytest.approx(0.75)
    assert found["equal_loss_tokens_spread"] == pytest.approx(0.0, abs=1e-12)
    assert {*at_equal_loss(best, dense).values()} == {None}  # it does not come to 3.85
    assert at_equal_loss(dense, dense)["equal_loss_bytes_up_ratio"] == 1.0
    assert {*at_equal_loss(few, None).values()} == {*at_equal_loss(lost, dense).values()} == {None}
    compare = compared(methods={one.method: PLAIN for one in table})
    line = next(line for line in list(tables(compare, table))[0][1] if line[0] == "few")
    assert "30 ± 0" in " ".join(line)


def test_a_row_with_a_diverged_seed_is_last():
    compare = compared(methods={name: PLAIN for name in ("a", "b")})
    found = {one: made(3.0)[0] for one in trainings(compare)}
    found |= {one: made(4.0)[0] for one in trainings(compare) if one.method == "b"}
    found[PlannedTraining("a", None, 4)] = {"loss": None}
    worse, best = rows(compare, found)[::-1]
    assert (best.method, best.mean, worse.method) == ("b", 4.0, "a")
    assert math.isinf(worse.mean) and worse.spread is None and not row_pairs(compare, [best, worse])
    assert "diverged with 1 seeds" in list(conclusions(compare, [best, worse]))[-1]


def test_only_tested_pairs_have_words_and_those_that_holm_tells_apart():
    table = [row("a", 4.0, 4.2), row("b", 4.01, 4.2), row("c", 5.0, 5.2)]
    compare = compared(methods={r.method: PLAIN for r in table}, pairs=[["b", "a"], ["c", "b"]])
    sample, tested, apart, level, _ = conclusions(compare, table)
    assert "64 of 640" in sample and "0.125" in sample and "0.20 %" in sample
    assert "2 pairs, named before" in tested and "a - c" not in apart + level
    assert "b - c (" in apart and "a - b (" in level
    untested = row_pairs(compare, table)[1]
    assert (untested.better, untested.worse, untested.holm) == ("a", "c", None)
    _, tested, level, *_ = conclusions(compared(methods=compare.methods), table)
    assert "3 pairs, each two" in tested and "2 told apart" in tested
    assert level.startswith("Not told apart: a - b (")
    _, alone, *_ = conclusions(compared(seeds=[3]), [row("a", 4.0)])
    assert "One seed" in alone


def test_a_table_says_which_tokens_its_trainings_had_and_what_a_seed_draws():
    few, many = made(4.0, 4.1), [one | {"tokens": 1_048_576} for one in made(5.0, 5.1)]
    table = [row("a")._replace(seeds=few), row("b")._replace(seeds=tuple(many))]
    said = made_of(compared(), table, "code", "nats per pixel")
    assert "100" in said and "1,048,576" in said and "819,200" not in said
    assert made_of(compared(), table[:1], "code", "").startswith("100 tokens a training")
    most = BASE.held_out.sequences
    alike, drawn = by_seed(BASE, most), by_seed(BASE, most + 1)
    assert "the same rows" in alike and "held-out rows" not in alike
    assert "the same rows" not in drawn and "held-out rows" in drawn


def test_what_fails_has_a_column_of_losses_of_hours_and_of_tokens():
    compare = compared(failures={"liar": {"faults": [LIAR]}})
    plain = row("a", 4.0, 4.2)
    one_lost = row("a", 5.0, None)._replace(failure="liar")
    whole, losses, costs, hours, same_tokens, tokens = tables(compare, [plain, one_lost])
    assert whole[0][0] == "method" and len(whole[1]) == 1
    assert losses[0] == ("held-out loss, by what fails", "none", "liar")
    assert losses[1] == [("a", "4.100 ± 0.141", "diverged, 1 of 2")]
    assert costs[1] == [("a", "–", "–")]  # of no seeds that both have
    assert hours[0][1:] == ("none", "liar") and hours[1][0][1] != "–"
    late = record(compare, plain, [plain])
    assert (late["train_seconds"], late["coordinator_seconds"]) == (100.0, 0.0)
    assert late["seconds_for_all_tokens"] == 819_200  # it trained on 100 tokens in 100 seconds
    assert same_tokens[1][0][1] == f"{819_200 / 3600:.3g}"
    count = f"{plain.first('tokens'):,}"
    assert tokens[1] == [("a", count, count)]
    assert [len(cells) for cells in whole[1]] == [len(whole[0])]
    assert len(list(tables(compared(), [plain]))) == 1


def test_what_a_failure_adds_is_a_paired_difference_from_the_same_method_without():
    compare = compared(
        methods={"a": PLAIN, "b": PLAIN}, failures={"liar": {"faults": [LIAR]}}, seeds=[3, 4]
    )
    table = [row("a", 4.0, 4.2), row("b", 5.0, 5.2)]
    table += [row("a", 5.0, 5.21)._replace(failure="liar")]
    table += [row("b", 5.1, 5.0)._replace(failure="liar")]
    costs = {cost.worse: cost for cost in failure_costs(table)}
    assert {(cost.better, name) for name, cost in costs.items()} == {
        ("a", "a, liar"),
        ("b", "b, liar"),
    }
    assert costs["a, liar"].mean == pytest.approx(1.005) and costs["a, liar"].told_apart
    assert not costs["b, liar"].told_apart
    added = list(tables(compare, table))[2]
    assert added[1] == [("a", "–", str(costs["a, liar"])), ("b", "–", str(costs["b, liar"]))]
    lines = list(conclusions(compare, table))
    at = next(n for n, line in enumerate(lines) if "with a failure" in line)
    assert "2 pairs" in lines[at] and "1 told apart" in lines[at]
    assert lines[at + 1].startswith("Told apart: a - a, liar (") and "b - b" not in lines[at + 1]
    assert not failure_costs(table[:2])


def test_nothing_beats_a_row_for_its_bytes_but_what_a_test_does_not_tell_apart():
    dense, few = row("dense", 4.0, 4.01, bytes_up=1000), row("few", 4.5, 4.52, bytes_up=10)
    level = row("level", 4.51, 4.52, bytes_up=9.2)  # 1.1 times as many bytes are as few
    worse, lost = row("worse", 5.6, 5.62, bytes_up=500), row("lost", None, 4.0, bytes_up=1)
    table = [dense, few, level, worse, lost]
    methods = {one.method: PLAIN for one in table}

    def names(*pairs: tuple[str, str]) -> list[str]:
        compare = compared(methods=methods, pairs=pairs)
        return [one.method for one in unbeaten(table, row_pairs(compare, table))]

    assert names(("few", "level")) == ["dense", "few", "level"]
    assert names(("few", "worse")) == ["dense", "few"]  # level was not tested: no claim
    assert names() == ["dense", "few", "level"]  # each two are tested; worse is beaten
    assert not any("beat" in line for line in conclusions(compared(), [lost]))
