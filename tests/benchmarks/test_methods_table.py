"""What README and RESULTS say of methods follows from the committed results of comparisons."""

import csv
import io
import re
from collections import defaultdict

import numpy as np
import pytest
import tomlkit
from PIL import Image

from benchmarks import methods_table
from benchmarks.methods_table import FOLDER, PAGES, SECTION, derived, filled, rows
from parts.comparison import output_files
from parts.comparison.results_table import conclusions, row_pairs
from parts.comparison.search import Found
from pipeline.stage.keys import PROJECT
from tests.parts.comparison.examples import BASE, PLAIN, compared, row

ADVICE = PROJECT / "docs/how-to/choose-an-optimizer.md"
DIFFERENCE = re.compile(r"-?\d\.\d{3} \[-?\d\.\d{3}, -?\d\.\d{3}\]")
SPREAD = re.compile(r"[\d.]+ ± [\d.e-]+")


def table(name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((FOLDER / name).read_text())))


def seeds() -> dict[str, list[float]]:
    found = defaultdict(list)
    for one in table("methods.seeds.csv"):
        found[one["method"]].append(float(one["loss"]))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_sections_of_a_page_are_those_of_the_results(page):
    text = page.read_text()
    assert (
        len(SECTION.findall(text)) == text.count("<!-- methods") == text.count("<!-- end -->") > 0
    )
    assert filled(text) == text


@pytest.mark.parametrize("name", ["methods.csv", "methods.pairs.csv"])
def test_derived_results_are_those_of_seeds_and_curves(name):
    made, kept = list(csv.DictReader(io.StringIO(derived()[name]))), table(name)
    assert len(made) == len(kept) >= 10
    for one, other in zip(made, kept, strict=True):
        assert one.keys() == other.keys()
        for column, value in one.items():
            try:
                assert float(value) == pytest.approx(float(other[column]), rel=1e-9), column
            except ValueError:
                assert value == other[column], column


def test_means_and_what_whole_gradients_need_are_numpys():
    """The reference is the lowest mean of those that send 32 bits in each local step."""
    losses, records = seeds(), {one["method"]: one for one in table("methods.csv")}
    for name, one in records.items():
        assert float(one["loss"]) == pytest.approx(np.mean(losses[name]))
        assert float(one["spread"]) == pytest.approx(np.std(losses[name], ddof=1))
    whole = [n for n, one in records.items() if float(one["bits_per_parameter_and_step_up"]) >= 32]
    best = min(whole, key=lambda name: np.mean(losses[name]))
    curves = defaultdict(list)
    for point in table("methods.curves.csv"):
        if point["method"] == best:
            amounts = [
                float(point[name]) for name in ("tokens", "bytes_up", "train_seconds", "loss")
            ]
            curves[point["seed"]].append(amounts)
    *amounts, loss = np.mean([*curves.values()], axis=0).T
    assert np.all(np.diff(loss) < 0)
    for one in records.values():
        for name, column in zip(("tokens", "bytes_up", "train_seconds"), amounts, strict=True):
            needed = np.interp(-float(one["loss"]), -loss, column)
            assert float(one[f"equal_loss_{name}"]) == pytest.approx(needed)
            ratio = float(one[f"equal_loss_{name}_ratio"])
            assert ratio == pytest.approx(needed / float(one[name]), rel=1e-6)


def test_what_is_told_apart_is_holms_decision():
    """Step by step: the smallest p at 0.05 over as many as are left, until one is not."""
    pairs = [one for one in table("methods.pairs.csv") if one["holm"]]
    named = {frozenset((one["better"], one["worse"])) for one in pairs}
    assert named == {*map(frozenset, methods_table.compared().pairs)}
    apart = set()
    for left, one in zip(
        range(len(pairs), 0, -1), sorted(pairs, key=lambda one: float(one["p"])), strict=True
    ):
        if float(one["p"]) > 0.05 / left:
            break
        apart.add((one["better"], one["worse"]))
    assert apart == {(o["better"], o["worse"]) for o in pairs if o["told_apart"] == "True"}
    assert apart
    losses = seeds()
    for one in pairs:
        gap = np.mean(np.subtract(losses[one["worse"]], losses[one["better"]]))
        assert float(one["mean"]) == pytest.approx(gap)


def test_readmes_first_sentence_has_bytes_and_tokens_at_equal_loss():
    records = table("methods.csv")
    few = [one for one in records if float(one["bits_per_parameter_and_step_up"]) <= 0.1]
    best = min(few, key=lambda one: float(one["loss"]))
    fewer, share = (float(best[f"equal_loss_{name}_ratio"]) for name in ("bytes_up", "tokens"))
    (first,) = re.findall(r"\*\*Train a Llama .*", PAGES[0].read_text())
    assert f"{fewer:.0f} times as many bytes" in first and f"{share:.2f} of the tokens" in first


def test_every_spread_and_interval_of_the_pages_is_one_of_the_results():
    kinds = SECTION.findall((FOLDER / "RESULTS.md").read_text())
    made = [line for _, name, kind, _ in kinds for line in getattr(methods_table, kind)(name)]
    made += [str(pair) for pair in row_pairs(methods_table.compared(), rows())]
    known = " ".join(made)
    results = (FOLDER / "RESULTS.md").read_text()
    results = results.split("\n## Methods at ")[1].split("\n## ")[0]
    for text in (PAGES[0].read_text(), results, ADVICE.read_text()):
        text = " ".join(text.split())
        said = {*DIFFERENCE.findall(text), *SPREAD.findall(text)}
        assert said and said <= {*DIFFERENCE.findall(known), *SPREAD.findall(known)}


def test_the_table_of_a_comparison_is_made_again_of_its_files(tmp_path, monkeypatch):
    """So the next table replaces this one by one command."""
    monkeypatch.chdir(tmp_path)
    compare = compared(methods={name: PLAIN for name in ("dense", "few", "lost")})
    table = [row("dense", 4.0, 4.2), row("few", 4.5, 4.7), row("lost", 4.0, None)]
    table[0] = table[0]._replace(
        seeds=tuple(seed | {"bytes_up": 400} for seed in table[0].seeds),
        found=Found({"rate": 2e-3, "x": 1.0}, ["rate"], ["rate"]),
    )
    files = output_files.write(tmp_path / "c.toml", compare, table, "code", BASE)
    content = {
        path.name.removeprefix("c."): path.read_text() for path in files if "csv" in path.name
    }
    for name, text in content.items():
        (tmp_path / f"methods.{name}").write_text(text)
    document = compare.model_dump(mode="json", exclude_none=True)
    (tmp_path / "methods.toml").write_text(tomlkit.dumps(document))
    monkeypatch.setattr(methods_table, "FOLDER", tmp_path)
    made = methods_table.derived()
    assert made["methods.pairs.csv"] == content["pairs.csv"]
    assert [*conclusions(compare, rows())] == [*conclusions(compare, table)]
    again, first = (
        list(csv.DictReader(io.StringIO(text))) for text in (made["methods.csv"], content["csv"])
    )
    assert [{k: v for k, v in one.items() if v} for one in again] == [
        {k: v for k, v in one.items() if v} for one in first
    ]


def test_the_readmes_picture_is_of_the_committed_results():
    pngs = methods_table.drawn(), (FOLDER / "methods.png").read_bytes()
    made, kept = (np.asarray(Image.open(io.BytesIO(png)).convert("L"), float) for png in pngs)
    assert made.shape == kept.shape and abs(made - kept).mean() < 0.5  # of 255
