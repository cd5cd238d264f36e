"""Simulated seconds against sums done by hand."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol import links
from lockstep.tables.links import Links
from tests.errors import refused


@dataclass(frozen=True)
class Table:
    tokens_per_second: object = 1000.0
    latency_seconds: object = 0.5
    upload_mbps: object = 8.0  # one megabyte a second
    download_mbps: object = 80.0  # ten
    topology: str = "broadcast"
    computed: bool = True


def test_a_message_arrives_after_its_tokens_the_latency_and_its_bytes():
    assert links.arrivals(Table(), [3], {3: 4000}, {3: 2_000_000}, 0) == {3: 4.0 + 0.5 + 2.0}


def test_list_too_short_for_a_peer_is_refused_with_its_key():
    with refused("links", "upload_mbps", 2):
        links.arrivals(Table(upload_mbps=[8.0, 8.0]), [2], {2: 1}, {2: 1}, 0)


def test_an_overlapped_round_takes_the_longer_of_training_and_transfer():
    one, two = {0: 2_000_000}, {0: 2_000_000, 1: 1_000_000}
    cases = [  # tokens of each peer, sizes; seconds beside none, half and all of the training
        (4000, one, {0: 4.0 + 2.5}, {0: 2.0 + 2.5}, {0: 4.0}),
        (1000, one, {0: 1.0 + 2.5}, {0: 0.5 + 2.5}, {0: 2.5}),
        (1000, two, {0: 1.0 + 2.7, 1: 1.0 + 1.6}, {0: 0.5 + 2.7, 1: 0.5 + 1.6}, {0: 2.7, 1: 1.6}),
    ]
    for tokens, sizes, *expected in cases:
        for overlapped, seconds in zip((0.0, 0.5, 1.0), expected, strict=True):
            found = links.arrivals(Table(), sizes, dict.fromkeys(sizes, tokens), sizes, overlapped)
            assert found == pytest.approx(seconds)


def test_a_check_takes_the_fetch_over_the_narrower_link_and_the_verifiers_own_speed():
    table = Table(
        tokens_per_second=(100.0, 1000.0, 500.0),
        latency_seconds=(0.1, 0.2, 0.4),
        upload_mbps=(8.0, 16.0, 80.0),
        download_mbps=(80.0, 4.0, 40.0),
    )
    cases = {  # latency of the sender, 2 MB at the narrower of its upload and the other's download
        (1, 0): 0.1 + 16 / 4 + 4000 / 1000,
        (2, 0): 0.1 + 16 / 8 + 4000 / 500,
        (0, 2): 0.4 + 16 / 80 + 4000 / 100,
    }
    for (verifier, peer), seconds in cases.items():
        found = links.check_seconds(table, verifier, peer, tokens=4000, size=2_000_000)
        assert found == pytest.approx(seconds)


def test_who_joins_loads_the_params_over_its_own_downlink():
    table = Table(latency_seconds=(0.5, 0.25), upload_mbps=1.0, download_mbps=(80.0, 16.0))
    assert links.load_seconds(table, 0, size=20_000_000) == 0.5 + 2.0
    assert links.load_seconds(table, 1, size=20_000_000) == 0.25 + 10.0


def test_no_time_is_infinite_at_the_slowest_links_a_run_file_can_have():
    table = Links(
        upload_mbps=0.001, download_mbps=0.001, tokens_per_second=0.001, latency_seconds=1e6
    )
    tokens, sizes = {0: 2**64, 1: 2**64}, {0: 2**63, 1: 2**63}
    times = [
        *links.arrivals(table, range(256), tokens, sizes, 0).values(),
        links.check_seconds(table, 0, 1, tokens=2**64, size=2**63),
        links.load_seconds(table, 0, size=2**63),
    ]
    assert all(map(math.isfinite, times))


SPEED = st.sampled_from([0.3, 1.0, 1.1, 7.0]) | st.floats(0.1, 100)
SECONDS = st.sampled_from([0.0, 0.25]) | st.floats(0, 3)


@given(
    peers=st.lists(
        st.tuples(st.booleans(), st.integers(0, 10**6), SECONDS, SPEED), min_size=1, max_size=9
    )
)
def test_each_receiver_downloads_the_others_messages_in_the_order_they_were_sent(peers):
    sends, sizes, latency, download = zip(*peers, strict=True)
    table = Table(latency_seconds=latency, download_mbps=download)
    sizes = {peer: size for peer, size in enumerate(sizes) if sends[peer]}
    tokens = dict.fromkeys(sizes, 0)
    sent = {peer: latency[peer] + size * 8 / 8e6 for peer, size in sizes.items()}
    expected = dict(sent)
    for receiver, mbps in enumerate(download):
        free = 0.0
        for peer in sorted(sent, key=lambda peer: (sent[peer], peer)):
            if peer != receiver:
                free = max(free, sent[peer]) + sizes[peer] * 8 / (mbps * 1e6)
                expected[peer] = max(expected[peer], free)
    found = links.arrivals(table, range(len(peers)), tokens, sizes, 0)
    assert list(found.items()) == sorted(expected.items())


def test_a_hub_sends_one_message_back_to_the_slowest_receiver():
    table = Table(topology="hub", download_mbps=(80.0, 8.0))
    sizes = {0: 1_000_000, 1: 2_000_000}
    arrived = links.arrivals(table, [0, 1], {0: 1000, 1: 3000}, sizes)
    # sent after 1 + 0.5 + 1 and 3 + 0.5 + 2; then 0.5 and 2 MB at 1 MB/s
    assert arrived == {0: 2.5 + 2.5, 1: 5.5 + 2.5}
    assert links.arrivals(table, [0, 1], {}, {}) == {}
    assert links.traffic("hub", [1, 2], 4) == (3, 8)


def test_a_ring_takes_its_hops_after_the_last_has_trained():
    table = Table(topology="ring", upload_mbps=(8.0, 16.0, 8.0))
    sizes = dict.fromkeys(range(3), 3_000_000)
    tokens = {0: 1000, 1: 4000, 2: 1000}
    # 4 hops of 0.5 s and 1 MB at 1 MB/s, after 4 s of training
    assert links.arrivals(table, range(3), tokens, sizes) == dict.fromkeys(range(3), 4 + 4 * 1.5)
    hidden = links.arrivals(table, range(3), tokens, sizes, overlapped=1.0)
    assert hidden == dict.fromkeys(range(3), 6.0)
    assert links.arrivals(table, [1], {1: 1000}, {1: 1}) == {1: 1.0}  # alone
    assert links.traffic("ring", [3, 3, 3], 3) == (12, 12)
    assert links.traffic("broadcast", [3, 3, 3], 3) == (9, 18)
    assert links.traffic("ring", [], 3) == (0, 0)
