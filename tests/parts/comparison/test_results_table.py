"""The table of a comparison: what it computes from results, and what it says was shown."""

import itertools
import math
from io import BytesIO

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from benchmarks import methods_picture
from parts.comparison import written
from parts.comparison.pairs import differences
from parts.comparison.results_table import (
    conclusions,
    failure_costs,
    front,
    loss_at,
    made_of,
    record,
    row_pairs,
    rows,
    tables,
    tokens_to,
)
from parts.comparison.trainings import PlannedTraining, by_seed, trainings
from pipeline.stage.keys import PROJECT
from tests.parts.comparison.examples import BASE, LIAR, PLAIN, compared, made, row


def test_the_loss_at_some_bytes_lies_on_the_line_between_two_measures():
    (result,) = made(4.0)
    curve = result["curve"]
    assert loss_at(curve, "bytes_up", 9) is None  # before the first measure of a trained model
    assert loss_at(curve, "bytes_up", 10) == 5.0
    assert loss_at(curve, "bytes_up", 15) == 4.5
    assert loss_at(curve, "bytes_up", 99) == 4.0
    both = row("x", 4.0, 3.0)
    assert both.loss_at("bytes_up", 15) == 4.0
    assert row("y", 4.0, None).loss_at("bytes_up", 15) is None
    assert tokens_to(curve, 4.5) == 150 and tokens_to(curve, 3.9) is None
    assert row("y", 4.0, 3.0).tokens_to(4.0) == 150 == (200 + 100) / 2


def test_tokens_to_a_loss_are_0_of_a_curve_that_begins_there_and_unknown_with_a_failure():
    at_most = [{"tokens": 100 * i, "loss": loss} for i, loss in enumerate((3.0, 3.1, 3.1, 2.9))]
    assert tokens_to(at_most, 3.4) == 0 and tokens_to(at_most, 2.95) == pytest.approx(275)
    failed = row("a", 4.0)._replace(failure="liar")
    assert failed.tokens_to(4.5) is None and row("a", 4.0).tokens_to(4.5) == 150


def test_a_row_with_a_diverged_seed_is_last():
    compare = compared(methods={name: PLAIN for name in ("a", "b")})
    found = {one: made(3.0)[0] for one in trainings(compare)}
    found |= {one: made(4.0)[0] for one in trainings(compare) if one.method == "b"}
    found[PlannedTraining("a", None, 4)] = {"loss": None}
    worse, best = rows(compare, found)[::-1]
    assert (best.method, best.mean, worse.method) == ("b", 4.0, "a")
    assert math.isinf(worse.mean) and worse.spread is None and not row_pairs([best, worse])
    assert "diverged with 1 seeds" in list(conclusions(compare, [best, worse]))[-1]


def test_paired_differences_are_students_and_hold_for_all_pairs():
    """By hand: t(1 - 0.05 / 2 / 3, 2 degrees) = 7.6488; equal seeds differ by 1.0, 1.1, 1.2."""
    losses = {"a": [4.0, 5.0, 6.0], "b": [5.0, 6.1, 7.2], "c": [4.2, 5.0, 5.9]}
    found = {(one.better, one.worse): one for one in differences(losses)}
    assert len(found) == 3
    far = found["a", "b"]
    assert (far.mean, far.reach) == pytest.approx((1.1, 7.6488 * 0.1 / math.sqrt(3)), rel=1e-4)
    assert far.sure and not found["a", "c"].sure
    assert differences({"a": [4.0], "b": [9.0]})[0].reach is None


def test_only_intervals_without_0_decide_an_order():
    table = [row("a", 4.0, 4.2), row("b", 4.1, 4.4), row("c", 5.0, 5.2)]
    compare = compared(methods={r.method: PLAIN for r in table})
    sample, _, first, second, _ = conclusions(compare, table)
    assert "64 of 640" in sample and "0.125" in sample
    assert first.startswith("a cannot be told apart from: b (") and "c (" not in first
    assert second.startswith("b cannot be told apart from: c (")  # 0.8 and 0.9 higher
    _, alone, *_ = conclusions(compared(seeds=[3]), [row("a", 4.0)])
    assert "One seed" in alone


def test_a_table_says_which_tokens_its_trainings_had_and_what_a_seed_draws():
    few, many = made(4.0, 4.1), [one | {"tokens": 1_048_576} for one in made(5.0, 5.1)]
    table = [row("a")._replace(seeds=few), row("b")._replace(seeds=tuple(many))]
    said = made_of(compared(), table, "code")
    assert "100" in said and "1,048,576" in said and "819,200" not in said
    assert made_of(compared(), table[:1], "code").startswith("100 tokens a training")
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
    """By hand: t(1 - 0.05 / 2 / 2, 1 degree) = 25.452; the first's seeds differ by 1.0 and 1.01."""
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
    found = costs["a, liar"]
    assert (found.mean, found.reach) == pytest.approx((1.005, 25.452 * 0.005), rel=1e-4)
    assert found.sure and not costs["b, liar"].sure
    added = list(tables(compare, table))[2]
    assert added[1] == [("a", "–", str(found)), ("b", "–", str(costs["b, liar"]))]
    (line,) = (line for line in conclusions(compare, table) if "failures add" in line)
    assert "a, liar" in line and "b, liar" not in line and "pairs: 2" in line
    (line,) = (line for line in conclusions(compare, table[::2]) if "failures add" in line)
    assert "pairs: 1" in line  # of one method, which no other can be told apart from
    assert not failure_costs(table[:2])


def test_the_front_has_no_row_that_another_beats_with_as_few_bytes():
    dense, few = row("dense", 4.0, bytes_up=1000), row("few", 4.5, bytes_up=10)
    worse, lost = row("worse", 4.6, bytes_up=500), row("lost", None, bytes_up=1)
    assert front([dense, few, worse, lost]) == [dense, few]
    assert not any("as few bytes" in line for line in conclusions(compared(), [lost]))


def test_methods_that_send_nearly_the_same_share_one_label_of_bytes():
    axes = Figure().subplots()
    written._panel(
        axes, [row("a", 5.3, bytes_up=955), row("b", 5.2, bytes_up=958)], *written.PANELS[1]
    )
    left, right = axes.get_xlim()
    minor = [label.get_text() for label in axes.get_xticklabels(minor=True)]
    assert right / left == pytest.approx(10) and not any(minor)


def test_names_in_the_plots_are_legible_and_none_lies_on_another(monkeypatch):
    drawn: list[list] = []
    move_apart = written._move_apart
    monkeypatch.setattr(
        written, "_move_apart", lambda names: drawn.append(names) or move_apart(names)
    )
    rows = [row(f"method number {i}", 4 + i // 3 / 10, bytes_up=10 + i % 2) for i in range(12)]
    png = Image.open(BytesIO(written.draw(rows)))
    for names in drawn:
        assert len({(name.get_text(), name.arrow_patch.get_edgecolor()) for name in names}) == 12
        extents = [Text.get_window_extent(name) for name in names]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(extents, 2))
        in_the_readme = 830 / png.width  # GitHub's column
        assert all(a.height * in_the_readme >= 11 and a.x1 <= png.width for a in extents)
    lines = drawn[0][0].axes.get_lines()[::2]
    assert len({(line.get_color(), str(line._dash_pattern)) for line in lines}) == 12


def test_the_readmes_picture_is_drawn_of_the_committed_curves():
    pngs = written.draw(methods_picture.rows()), (PROJECT / "benchmarks/methods.png").read_bytes()
    drawn, kept = (np.asarray(Image.open(BytesIO(png)).convert("L"), float) for png in pngs)
    assert drawn.shape == kept.shape and abs(drawn - kept).mean() < 0.5  # of 255
