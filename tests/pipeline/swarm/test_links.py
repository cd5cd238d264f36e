"""Simulated seconds against sums done by hand."""

from dataclasses import dataclass

import pytest

from pipeline.errors import LockstepError
from pipeline.swarm import links


@dataclass(frozen=True)
class Table:
    tokens_per_second: object = 1000.0
    latency_seconds: object = 0.5
    upload_mbps: object = 8.0  # one megabyte a second
    download_mbps: object = 80.0  # ten


def test_times_are_tokens_by_speed_and_bytes_by_bandwidth_and_latency():
    times = links.round_times(Table(), 3, tokens=4000, bytes_up=2_000_000, bytes_down=5_000_000)
    assert times == links.Times(train_seconds=4.0, upload_seconds=2.5, download_seconds=1.0)
    assert times.arrival == 6.5


def test_each_peer_has_its_own_number_where_a_list_is_given():
    table = Table(tokens_per_second=(1000.0, 500.0), upload_mbps=[8.0, 4.0], latency_seconds=0)
    for peer, arrival in ((0, 2.0), (1, 4.0)):
        times = links.round_times(table, peer, tokens=1000, bytes_up=1_000_000, bytes_down=0)
        assert times.arrival == arrival


def test_list_too_short_for_a_peer_is_refused_with_its_key():
    with pytest.raises(LockstepError, match=r"\[links\] upload_mbps: 2 numbers and a peer 2"):
        links.round_times(Table(upload_mbps=[8.0, 8.0]), 2, tokens=1, bytes_up=1, bytes_down=1)


def test_messages_arrive_when_the_slowest_receiver_has_downloaded_them():
    table = Table(latency_seconds=0.0, download_mbps=(80.0, 80.0, 8.0))
    sizes = {0: 1_000_000, 1: 1_000_000}
    arrived = links.arrivals(table, range(3), {0: 1000, 1: 3000}, sizes)
    # Sent after 2 and 4 s; peer 2 needs one more second for each, and is free in between.
    assert arrived == {0: 3.0, 1: 5.0}


def test_messages_queue_behind_each_other_on_a_slow_downlink():
    table = Table(latency_seconds=0.0, download_mbps=(80.0, 80.0, 4.0))
    sizes = {0: 1_000_000, 1: 1_000_000}
    # Both sent after 2 s; peer 2 downloads one after the other, two seconds each.
    assert links.arrivals(table, range(3), {0: 1000, 1: 1000}, sizes) == {0: 4.0, 1: 6.0}


def test_peer_alone_downloads_nothing():
    assert links.arrivals(Table(), [0], {0: 1000}, {0: 1_000_000}) == {0: 2.5}
