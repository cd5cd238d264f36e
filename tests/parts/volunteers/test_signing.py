"""How many rounds ahead are signed."""

import pytest

from parts.volunteers import layout
from parts.volunteers.lab.signing import rounds_ahead, rounds_over, rounds_with_links
from parts.volunteers.store.folder import FolderStore
from tests.parts.volunteers.stores import put_at


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path)


def put(store, step, peer, what, seconds):
    put_at(store, layout.of_peer(step, peer, what), b"x", seconds)


def close(store, *times):
    """Rounds that one peer closed, and in whose next ones two sent messages."""
    for step, seconds in enumerate(times, 1):
        put(store, step, 3, "closed", seconds)
        for peer in (2, 3):
            put(store, step + 1, peer, "record", seconds)


def ahead(store, hours, last=9999):
    config = {"total_steps": last, "max_round_train_time": 300, "min_clients": 2}
    return rounds_ahead(store, hours, config)


def test_a_run_that_has_not_begun_takes_its_longest_rounds(store):
    assert ahead(store, 24) == range(1, 361)
    assert ahead(store, 24, 30) == range(1, 31)
    close(store, 1000)
    assert ahead(store, 24) == range(2, 362)


@pytest.mark.parametrize(("seconds", "count"), [(60, 75), (120, 38), (9000, 15), (0, 4500)])
def test_a_run_that_goes_on_takes_the_pace_of_its_last_rounds(store, seconds, count):
    close(store, *range(0, 30_000, 6000), *(30_000 + n * seconds for n in range(33)))
    assert ahead(store, 1) == range(39, 39 + count)


def test_a_peer_that_fills_its_slots_of_rounds_to_come_makes_none_of_them_over(store):
    close(store, 1000, 1060)
    for step in range(3, 20):
        for what in ("closed", "record"):
            put(store, step, 1, what, 1000)
    assert rounds_over(store, 2) == 2 and rounds_with_links(store) == 19
    assert ahead(store, 1) == range(3, 20 + 75)


def test_a_peer_that_puts_all_its_links_at_once_makes_no_rounds_seem_short(store):
    close(store, *(1000 + 300 * n for n in range(40)))
    for step in range(1, 60):
        for what in ("closed", "record"):
            put(store, step, 1, what, 1000)
    assert len(ahead(store, 1)) < 60


def test_records_of_rounds_to_come_stop_nobody_who_signs(store):
    close(store, 1000, 1060)
    for step in range(4, 9):  # of as many peers as must be there, before any link
        for peer in (1, 2):
            put(store, step, peer, "record", 1070)
    assert ahead(store, 1).start == 3


def test_names_that_somebody_filled_a_round_with_stop_nobody_who_signs(store, monkeypatch):
    monkeypatch.setattr(FolderStore.names, "__defaults__", (3,))
    close(store, 1000, 1060)
    for number in range(9):
        store.create(f"rounds/00000002/junk{number}", b"x")
    assert ahead(store, 1).start == 3


@pytest.mark.parametrize("there", [*range(20), 63, 64, 65, 1000])
def test_what_is_there_is_counted_with_few_looks(there):
    looks = []
    assert layout.count(lambda number: looks.append(number) or number < there) == there
    assert len(looks) <= 2 * there.bit_length() + 1
