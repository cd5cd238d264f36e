"""The picture of a comparison: legible, nothing on anything else, and of the committed numbers."""

import itertools
from io import BytesIO

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from parts.comparison import picture
from tests.parts.comparison.examples import row


@pytest.fixture
def drawn(monkeypatch):
    """The names of each plot, which are moved apart when all else stands."""
    names: list[list] = []
    move_apart = picture._move_apart
    monkeypatch.setattr(picture, "_move_apart", lambda of: names.append(of) or move_apart(of))
    return names


def test_methods_that_send_nearly_the_same_share_one_label_of_bytes():
    axes = Figure().subplots()
    picture._by_bytes(axes, [row("a", 5.3, bytes_up=955), row("b", 5.2, bytes_up=958)])
    left, right = axes.get_xlim()
    minor = [label.get_text() for label in axes.get_xticklabels(minor=True)]
    assert right / left == pytest.approx(10) and not any(minor)


@pytest.mark.parametrize(("count", "most"), [(12, 11), (10, 10_000)])
def test_names_are_legible_and_none_lies_on_another_or_on_an_end(drawn, count, most):
    sent = [10 if i % 2 else most for i in range(count)]
    rows = [row(f"method number {i}", 4 + i // 3 / 10, bytes_up=sent[i]) for i in range(count)]
    png = Image.open(BytesIO(picture.draw(rows, 7, "nats")))
    for names in drawn:
        assert [name.get_text() for name in names] == [one.label for one in rows]
        extents = [Text.get_window_extent(name) for name in names]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(extents, 2))
        ends = [name.axes.transData.transform(name.xy) for name in names]
        assert not any(box.contains(*end) for box in extents for end in ends)
        in_the_readme = 830 / png.width  # GitHub's column
        assert all(a.height * in_the_readme >= 11 for a in extents)
        assert all(a.x0 >= 0 and a.x1 <= png.width and a.y1 <= png.height for a in extents)
    lines = drawn[0][0].axes.get_lines()
    assert len({(line.get_color(), str(line._dash_pattern)) for line in lines[::2]}) == count
    ends = {(line.get_color(), line.get_marker()) for line in lines[1::2]}
    bars = [b for b in drawn[1][0].axes.containers if isinstance(b, ErrorbarContainer)]
    assert ends == {(bar[0].get_color(), bar[0].get_marker()) for bar in bars}
    assert len(ends) == count


def test_bands_and_bars_are_standard_deviations_and_the_picture_says_of_what(drawn):
    """By hand: 4.0 and 4.2 have 0.1414 around 4.1, before the end 5.1; the last row has no loss."""
    picture.draw([row("a", 4.0, 4.2), row("b", 4.3, 4.3), row("c", 4.0, None)], 7, "nats a pixel")
    (above, *_), (below, *others) = drawn
    assert [name.get_text() for name in others] == ["b"]
    (band, _) = above.axes.collections
    low, high = np.sort(band.get_paths()[0].vertices[:, 1])[[0, -1]]
    assert (low, high) == pytest.approx((4.1 - 0.02**0.5, 5.1 + 0.02**0.5))
    (segments,) = below.axes.containers[0][2][0].get_segments()
    assert segments[:, 1] == pytest.approx([4.1 - 0.02**0.5, 4.1 + 0.02**0.5])
    said = below.axes.figure.get_supxlabel()
    assert "7 peers" in said and "100 parameters" in said and "2 seeds" in said
    assert "1 tokens a parameter" in said and "standard deviation" in said
    assert above.axes.get_ylabel() == "held-out loss, nats a pixel"


def test_the_upper_half_of_the_losses_that_end_apart_is_cut_off(drawn):
    picture.draw([row("a", 4.0), row("b", 5.0)], 7, "nats")
    low, high = drawn[0][0].axes.get_ylim()
    assert low < 4.0 and high == pytest.approx(6.0)  # of curves that begin at 9
