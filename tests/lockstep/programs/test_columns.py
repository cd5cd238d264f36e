"""Rows by column: what is cut where, and what a loss counts."""

from itertools import combinations

import numpy as np
import pytest

from lockstep.programs.columns import PLAIN, UNCOUNTED, counted, split

OTHERS = ("labels", "position_ids", "sequence_ids")
SUBSETS = [("inputs", *some) for count in range(4) for some in combinations(OTHERS, count)]


@pytest.mark.parametrize("columns", SUBSETS, ids="-".join)
def test_each_column_of_a_row_is_found_where_it_stands(columns):
    rows_BW = np.arange(2 * 5 * len(columns)).reshape(2, -1)
    found = split(rows_BW, columns)
    for name, values_BL in found._asdict().items():
        if name not in columns:
            assert values_BL is None
            continue
        start = 5 * columns.index(name)
        assert values_BL.tolist() == [
            list(range(row * 5 * len(columns) + start, row * 5 * len(columns) + start + 5))
            for row in range(2)
        ]


def test_plain_rows_are_handed_on_as_they_are_and_every_prediction_counts():
    rows_BW = np.zeros((2, 5), np.int32)
    assert split(rows_BW, PLAIN).inputs is rows_BW
    assert counted(rows_BW, PLAIN).tolist() == [[True] * 4] * 2


def test_labels_say_what_counts_and_the_first_is_predicted_by_nothing():
    inputs, labels = [1, 2, 3, 4], [7, UNCOUNTED, 0, UNCOUNTED]
    found = counted(np.array([inputs + labels]), ("inputs", "labels"))
    assert found.tolist() == [[False, True, False]]
