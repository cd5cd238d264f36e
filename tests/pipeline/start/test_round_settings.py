"""What a round reads of a run file."""

from pipeline.start.round_settings import round_settings
from tests import tiny

SEVEN = {"config__global_batch_size_start": 7, "config__global_batch_size_end": 7}


def settings(**changes):
    return round_settings(tiny.parsed(peers__count=4, **SEVEN, **changes))


def test_a_step_over_a_store_has_one_shape_however_many_train():
    closing = settings(links__clock="store", config__witness_nodes=0).closing
    assert [closing.capacity(trainers) for trainers in (4, 3, 2)] == [4, 4, 4]  # min_clients is 2
    assert closing.capacity(1) == 7  # others have fallen silent
    closing = settings().closing
    assert [closing.capacity(trainers) for trainers in (4, 3, 2, 1)] == [2, 3, 4, 7]
