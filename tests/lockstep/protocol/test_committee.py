"""Psyche's golden vectors (LCG, shuffles, quorum) and what an assignment must always be."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol import committee


def test_lcg_gives_psyches_numbers():
    assert list(islice(committee.lcg(42), 3)) == [
        10481999410520546993,
        4159066171780167020,
        7615522811268512075,
    ]


@pytest.mark.parametrize(
    ("count", "seed", "order"),
    [(10, 42, [2, 1, 0, 6, 7, 5, 4, 9, 8, 3]), (5, 12345, [0, 2, 1, 4, 3])],
)
def test_deterministic_shuffle_gives_psyches_order(count, seed, order):
    assert committee.deterministic_shuffle(range(count), seed) == order


@pytest.mark.parametrize(
    ("salt", "places"),
    [("witness", (7, 4, 9, 2, 6, 1, 0, 3, 5, 8)), ("committee", (1, 7, 2, 9, 5, 0, 8, 3, 4, 6))],
)
def test_swap_or_not_gives_psyches_positions(salt, places):
    order = committee.order(12345, 10, salt, 10)
    assert tuple(map(order.index, range(10))) == places
    assert all(committee.order(12345, 10, salt, first) == order[:first] for first in range(12))


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 257, 600])
def test_swap_or_not_is_a_permutation(count):
    assert sorted(committee.order(7, count, "witness", count)) == list(range(count))


def test_witnesses_are_the_first_positions():
    assert committee.witnesses(12345, 10, 3) == (3, 5, 6)  # those at positions 2, 1 and 0


@pytest.mark.parametrize(("count", "elected"), [(4, 4), (32, 32), (40, 32)])
def test_witness_nodes_zero_elects_everyone_up_to_32(count, elected):
    assert len(committee.witnesses(1, count, 0)) == elected


@pytest.mark.parametrize(("percent", "elected"), [(0, set()), (9, set()), (39, {5, 0, 2})])
def test_verifiers_are_the_first_positions_of_the_committee(percent, elected):
    assert committee.verifiers(12345, 10, percent) == elected


QUORUM = {1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 4, 7: 4, 8: 5, 9: 6, 10: 6, 11: 7, 12: 8, 13: 8}
QUORUM |= {14: 9, 15: 10, 16: 10, 20: 13, 24: 16, 32: 21}


def test_witness_quorum_is_psyches_but_for_a_half():
    assert {elected: committee.witness_quorum(elected) for elected in QUORUM} == QUORUM
    assert all(2 * committee.witness_quorum(elected) > elected for elected in range(1, 257))


def test_assignment_gives_contiguous_ranges_in_shuffled_order():
    # 5 trainers in the order 0, 2, 1, 4, 3 share 17 sequences: the first two take 4.
    assert list(committee.plan(range(5), 12345, 100, 17).spans.items()) == [
        (0, (100, 103)),
        (1, (108, 110)),
        (2, (104, 107)),
        (3, (114, 116)),
        (4, (111, 113)),
    ]


SPANS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 30)), max_size=6)


def spans_below(data_index: int, gaps_and_sizes: list[tuple[int, int]]) -> tuple:
    """Disjoint spans, each some sequences below the one before it."""
    spans, last = [], data_index
    for gap, size in gaps_and_sizes:
        last -= gap
        spans.append((last - size + 1, last))
        last -= size
    return tuple(spans)


def sequences(spans) -> list[int]:
    return [index for first, last in spans for index in range(first, last + 1)]


@given(
    count=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
    batch_size=st.integers(1, 100),
    gaps_and_sizes=SPANS,
)
def test_plan_loses_and_repeats_no_sequence_and_takes_untrained_ones_first(
    count, seed, batch_size, gaps_and_sizes
):
    untrained = spans_below(1000, gaps_and_sizes)
    spans, fresh, waiting = committee.plan(range(count), seed, 1000, batch_size, untrained)
    given_out = sequences(spans.values())
    everything = sequences(untrained) + list(range(1000, 1000 + fresh))
    assert sorted(given_out + sequences(waiting)) == sorted(everything)
    assert len(set(given_out)) == len(given_out) <= batch_size
    share = -(-batch_size // count)
    assert all(0 < last - first + 1 <= share for first, last in spans.values())
    assert set(spans) <= set(range(count)) and list(spans) == sorted(spans)

    used = sum(index < 1000 for index in given_out)
    order = committee.deterministic_shuffle(range(count), seed)
    takers = [peer for peer in order if peer in spans and spans[peer][0] < 1000]
    assert takers == order[: len(takers)]
    assert sequences(spans[peer] for peer in takers) == sequences(untrained)[:used]
    assert sequences(waiting) == sequences(untrained)[used:]
    if waiting:  # for want of a trainer, or of room in the batch for one more piece
        first, last = waiting[0]
        piece = min(share, last - first + 1)
        assert len(takers) == count or used + piece > batch_size
    new = [spans[peer] for peer in order[len(takers) :] if peer in spans]
    assert sequences(new) == list(range(1000, 1000 + fresh))
    assert fresh == min(batch_size - used, (count - len(takers)) * share)
    if fresh:
        sizes = [last - first + 1 for first, last in new]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert len(sizes) == min(fresh, count - len(takers))


@given(count=st.integers(1, 40), batch_size=st.integers(1, 100), gaps_and_sizes=SPANS)
def test_plan_round_by_round_trains_everything_that_waits(count, batch_size, gaps_and_sizes):
    untrained, rounds = spans_below(1000, gaps_and_sizes), 0
    while untrained:
        left = len(sequences(untrained))
        untrained = committee.plan(range(count), rounds, 1000, batch_size, untrained).waiting
        assert len(sequences(untrained)) < left
        rounds += 1


def test_plan_by_hand():
    # In the order 0, 2, 1, 4, 3 and at most ceil(17 / 5) = 4 sequences each: 6 untrained ones are
    # pieces of 4 and 2, and three trainers share the 11 that are left.
    plan = committee.plan(range(5), 12345, 100, 17, ((50, 55),))
    assert plan.spans == {0: (50, 53), 1: (100, 103), 2: (54, 55), 3: (108, 110), 4: (104, 107)}
    assert plan.fresh == 11 and plan.waiting == ()


def test_verifiers_take_trainers_in_the_order_of_the_shuffle():
    order = [10 + index for index in committee.order(12345, 5, "verify", 5)]
    assert committee.verified(12345, (9, 3), range(10, 15)) == {3: order[0], 9: order[1]}
    assert order != sorted(order)


def test_more_verifiers_than_trainers_begin_again():
    checked = committee.verified(7, range(5), (8, 9))
    assert checked[0] == checked[2] == checked[4] != checked[1] == checked[3]
    assert set(checked.values()) == {8, 9}


@pytest.mark.parametrize(("verifiers", "trainers"), [((), (1, 2)), ((1, 2), ()), ((), ())])
def test_without_verifiers_or_trainers_nothing_is_verified(verifiers, trainers):
    assert committee.verified(7, verifiers, trainers) == {}


def test_round_seed_is_pinned_and_differs_by_run_and_step():
    # SHA-256("lockstep/round_seed:0:1")[:8], little-endian: transcripts depend on it.
    assert committee.round_seed(0, 1) == 10278363629702557079
    seeds = {committee.round_seed(run, step) for run in (0, 1, 11) for step in (1, 11, 111)}
    assert len(seeds) == 9 and all(0 <= seed < 2**64 for seed in seeds)
