"""How many rounds ahead are signed."""

import os

import pytest

from parts.volunteers import slots
from parts.volunteers.addresses.signing import rounds_ahead
from parts.volunteers.store.folder import FolderStore


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path)


def close(store, *times):
    for step, seconds in enumerate(times, 1):
        store.create(name := slots.of_peer(step, 3, "closed"), b"x")
        os.utime(store.root / name, (seconds, seconds))


def test_a_run_that_has_not_begun_takes_its_longest_rounds(store):
    assert rounds_ahead(store, 24, 300, 9999) == range(1, 361)
    assert rounds_ahead(store, 24, 300, 30) == range(1, 31)
    close(store, 1000)
    assert rounds_ahead(store, 24, 300, 9999) == range(2, 362)


@pytest.mark.parametrize(("seconds", "count"), [(60, 75), (120, 38), (9000, 15), (0, 4500)])
def test_a_run_that_goes_on_takes_the_pace_of_its_last_rounds(store, seconds, count):
    close(store, *range(0, 30_000, 6000), *(30_000 + n * seconds for n in range(33)))
    assert rounds_ahead(store, 1, 300, 9999) == range(39, 39 + count)


@pytest.mark.parametrize("there", [*range(20), 63, 64, 65, 1000])
def test_what_is_there_is_counted_with_few_looks(there):
    looks = []
    assert slots.count(lambda number: looks.append(number) or number < there) == there
    assert len(looks) <= 2 * there.bit_length() + 1
