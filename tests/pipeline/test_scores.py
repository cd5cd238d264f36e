"""Intervals of scores."""

import pytest

from pipeline.scores import Metric, TaskResult, interval, wilson


def result(**metrics):
    return TaskResult("t", metrics, None, 100, 0, "", "")


@pytest.mark.parametrize(("right", "count"), [(0, 20), (5, 20), (151, 500), (20, 20)])
def test_at_the_ends_of_wilsons_interval_the_share_is_1_96_standard_errors_away(right, count):
    share, ends = right / count, wilson(right / count, count)
    for true in ends:  # whose own standard error counts, not that of the share
        assert (share - true) ** 2 == pytest.approx(1.959964**2 * true * (1 - true) / count)
    assert 0 <= ends[0] <= share <= ends[1] <= 1


def test_an_interval_of_a_share_is_as_wide_as_its_standard_error_by_clusters_asks():
    def found(stderr: float | None) -> tuple[float, float]:
        return interval(result(acc=Metric(0.4, stderr)), "acc")

    count = result(acc=Metric(0.4, None)).documents
    alone = (0.4 * 0.6 / (count - 1)) ** 0.5
    assert found(None) == wilson(0.4, count) == pytest.approx(found(alone))
    low, high = found(3 * alone)
    assert (high - low) / 2 == pytest.approx(1.96 * 3 * alone, rel=0.2)
    assert found(alone / 3) == wilson(0.4, count)  # no document tells more than one


def test_an_interval_is_two_standard_errors_where_the_number_is_no_share():
    metric = Metric(2.5, 0.1)
    assert interval(result(bits_per_byte=metric), "bits_per_byte") == pytest.approx(
        (2.304, 2.696), abs=1e-3
    )
    assert interval(result(word_perplexity=Metric(9.0, None)), "word_perplexity") is None
