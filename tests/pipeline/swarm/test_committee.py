"""Psyche's golden vectors (LCG, shuffles, quorum) and what an assignment must always be."""

from itertools import islice

import pytest

from pipeline.swarm import committee
from pipeline.swarm.committee import Committee


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
    assert committee.positions(12345, 10, salt) == places


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 600])
def test_swap_or_not_is_a_permutation(count):
    assert sorted(committee.positions(7, count, "witness")) == list(range(count))


def test_swap_or_not_of_nobody_is_empty():
    assert committee.positions(7, 0, "witness") == ()


def test_witnesses_are_the_first_positions():
    assert committee.witnesses(12345, 10, 3) == (3, 5, 6)  # those at positions 2, 1 and 0


@pytest.mark.parametrize(("count", "elected"), [(4, 4), (32, 32), (40, 32)])
def test_witness_nodes_zero_elects_everyone_up_to_32(count, elected):
    assert len(committee.witnesses(1, count, 0)) == elected


def test_more_witnesses_than_peers_is_refused():
    with pytest.raises(ValueError, match="witness_nodes = 5, expected 0 to 4"):
        committee.witnesses(1, 4, 5)


def test_committee_seats_follow_the_positions():
    seats = committee.committees(12345, 10, verification_percent=30, tie_breakers=2)
    # Positions 0 and 1 break ties; floor(8 x 30 %) = 2 verify.
    assert [seats[i] for i in (5, 0)] == [Committee.TieBreaker] * 2
    assert [seats[i] for i in (2, 7)] == [Committee.Verifier] * 2
    assert seats.count(Committee.Trainer) == 6


def test_committee_sizes_are_psyches():
    seats = committee.committees(12345, 100, verification_percent=30, tie_breakers=10)
    counts = [seats.count(seat) for seat in Committee]
    assert counts == [10, 27, 63]


@pytest.mark.parametrize(("percent", "ties"), [(101, 0), (-1, 0), (0, 6)])
def test_impossible_committee_is_refused(percent, ties):
    with pytest.raises(ValueError, match="expected 0 to"):
        committee.committees(1, 5, verification_percent=percent, tie_breakers=ties)


QUORUM = {1: 1, 2: 2, 3: 2, 4: 2, 5: 3, 6: 4, 7: 4, 8: 5, 9: 6, 10: 6, 11: 7, 12: 8, 13: 8}
QUORUM |= {14: 9, 15: 10, 16: 10, 20: 13, 24: 16, 32: 21}


def test_witness_quorum_is_psyches():
    assert {elected: committee.witness_quorum(elected) for elected in QUORUM} == QUORUM


def test_quorum_of_no_witnesses_is_refused():
    with pytest.raises(ValueError, match="0 witnesses"):
        committee.witness_quorum(0)


def test_assignment_gives_contiguous_ranges_in_shuffled_order():
    # 5 trainers in the order 0, 2, 1, 4, 3 share 17 sequences: the first two take 4.
    assert list(committee.assign(range(5), 12345, 100, 17).items()) == [
        (0, (100, 103)),
        (1, (108, 110)),
        (2, (104, 107)),
        (3, (114, 116)),
        (4, (111, 113)),
    ]


def test_peers_beyond_the_batch_get_nothing():
    assert committee.assign(range(5), 12345, 0, 2) == {0: (0, 0), 2: (1, 1)}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 8, 64, 65])
@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_assignment_covers_the_batch_exactly_once(count, batch_size):
    spans = sorted(committee.assign(range(count), 99, 1000, batch_size).values())
    sequences = [i for first, last in spans for i in range(first, last + 1)]
    assert sequences == list(range(1000, 1000 + batch_size))
    sizes = [last - first + 1 for first, last in spans]
    assert max(sizes) - min(sizes) <= 1 and len(sizes) == min(count, batch_size)


def test_assignment_without_trainers_is_refused():
    with pytest.raises(ValueError, match="no trainers"):
        committee.assign([], 1, 0, 8)


def test_round_seed_is_pinned_and_differs_by_run_and_step():
    # SHA-256("lockstep/round_seed:0:1")[:8], little-endian: transcripts depend on it.
    assert committee.round_seed(0, 1) == 10278363629702557079
    seeds = {committee.round_seed(run, step) for run in (0, 1, 11) for step in (1, 11, 111)}
    assert len(seeds) == 9 and all(0 <= seed < 2**64 for seed in seeds)
