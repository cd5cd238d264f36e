"""Our models of links and failures have the numbers that three papers published."""

import pytest

from benchmarks import published
from benchmarks.published import ModelOnLink, in_turn

GIVEN = published.numbers()
CELLS = published.cells()


def test_every_cell_is_within_its_bound():
    """One step of the bandwidth grid; two for plain Streaming; four points of goodput."""
    assert len(CELLS) == 75 + 75 + 30
    for cell in CELLS:
        most = 4 if "goodput" in cell.table else 2 if cell.row.endswith(", streaming") else 1
        assert cell.apart <= most, cell


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_constant_is_not_within_them(factor):
    """Else the bounds above would hold of anything."""
    bits = {name: factor * value for name, value in GIVEN["bits"]["table6"].items()}
    other = GIVEN | {"bits": {"table6": bits}}
    assert sum(cell.apart > 1 for cell in published.table6(other)) > 60


@pytest.mark.parametrize(("rate", "lost"), [(0.01, 3.0), (1.0, 0.4), (4.0, 1.2)])
def test_the_simulation_of_failures_agrees_with_the_closed_form(rate, lost):
    share = published.simulated(rate, lost, seed=1)
    assert share == pytest.approx(1 / (1 + rate * lost), abs=0.01)


def test_the_last_layer_alone_is_late_where_the_link_is_quick():
    """Ten layers of 1 Gbit at 100 Gbit/s: the last, 0.01 s, comes after the step of 1 s."""
    model = ModelOnLink(params=1e10, layers=10, step_seconds=1.0, bits=1.0)
    assert in_turn(model, 1, 100.0) == pytest.approx(1 / 1.01)
    assert in_turn(model, 10, 100.0) == pytest.approx(10 / 10.01)
    # at 1 Gbit/s they queue behind the first, which is free after 1 / 3 + 2 / 30 s
    assert in_turn(model, 1, 1.0) == pytest.approx(1 / (1 / 3 + 2 / 30 + 10))


def test_the_page_has_every_table_with_what_is_fitted_said(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    published.main()
    page = (tmp_path / "published.md").read_text()
    assert page.count("\n## arXiv") == 3 and page.count("fitted to them") == 3
    assert len((tmp_path / "published.csv").read_text().splitlines()) == 1 + len(CELLS)
