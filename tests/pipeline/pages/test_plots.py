"""The colours of plots, as readers see them who lack a kind of cone, on a light and a dark page."""

import itertools
import re

import numpy as np
import pytest

from pipeline.pages import plots
from pipeline.pages.stage_results import Results
from pipeline.pages.templates import environment

# Machado, Oliveira and Fernandes 2009, of whole severity, on linear RGB
SEEN_BY = {
    "most": np.eye(3),
    "deuteranopes": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "protanopes": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "tritanopes": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
# of the filters of style.css.jinja: hue-rotate(180deg) as the CSS standard has it, after invert(1)
TURNED = np.array([[-0.574, 1.43, 0.144], [0.426, 0.43, 0.144], [0.426, 1.43, -0.856]])
# Ottosson 2020: OKLab, in which equal distances look equal; 0.02 is just seen
CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
OKLAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]


def srgb(colour: str) -> np.ndarray:
    return np.array([int(two, 16) for two in re.findall("..", colour.removeprefix("#"))]) / 255


def linear(rgb: np.ndarray) -> np.ndarray:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def on_a_page(colour: str, dark: bool) -> np.ndarray:
    """What a plot's colour is on the page, in linear RGB: there the card lightens what is black."""
    if not dark:
        return linear(srgb(colour))
    assert "invert(1) hue-rotate(180deg); mix-blend-mode: screen" in STYLE
    above, below = np.clip(TURNED @ (1 - srgb(colour)), 0, 1), srgb(CARD)
    return linear(above + below - above * below)


STYLE = environment(escape=False).get_template("style.css.jinja").render()
CARD = re.findall("--card: (#......)", STYLE)[1]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("reader", SEEN_BY)
def test_any_two_colours_are_told_apart(reader, dark):
    seen = [np.array(SEEN_BY[reader]) @ on_a_page(colour, dark) for colour in plots.COLOURS]
    lab = [np.array(OKLAB) @ np.cbrt(np.array(CONES) @ np.clip(rgb, 0, 1)) for rgb in seen]
    pairs = itertools.combinations(zip(plots.COLOURS, lab, strict=True), 2)
    least, *which = min(
        (float(np.linalg.norm(a - b)), one, other) for (one, a), (other, b) in pairs
    )
    print(f"{reader}, {'dark' if dark else 'light'}: {least:.3f} between {' and '.join(which)}")
    assert least > 0.1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_each_colour_stands_out_from_the_page(dark):
    """By the contrast ratio of WCAG 2, which asks 3 of graphics and 4.5 of text."""
    light = np.array([0.2126, 0.7152, 0.0722])
    page = light @ on_a_page("#ffffff", dark)
    for colour in (*plots.COLOURS, plots.INK):
        high, low = sorted((light @ on_a_page(colour, dark), page), reverse=True)
        ratio = (high + 0.05) / (low + 0.05)
        print(colour, dark, round(ratio, 2))
        assert ratio > (4.5 if colour == plots.INK else 2.4)


def test_data_that_are_no_tokens_are_counted_in_rows():
    columns = ("step", "loss", "bytes_up", "seconds")
    rows = [dict.fromkeys(columns, step) | {"tokens": 784 * step} for step in (1, 2, 3)]
    results = Results({}, {"bytes_up_of_data_parallel": 99}, {"findings": []})
    _, picture, *_ = plots.loss_pictures(results, rows, [], ("rows", 784))
    assert picture.name == "loss_by_rows"
    assert picture.alt.endswith("by rows, up to 3 rows, all peers together.")
