"""What is asked for: few requests, nothing twice, and first what a read waits for."""

import random
import threading
import time

from pipeline.net.transfers.stream import GAP_BYTES, REQUEST_BYTES, Streams
from pipeline.runfile import Network
from tests.pipeline.net.stream.far import (
    KIB,
    MIB,
    SECONDS,
    requests_for,
    rested,
    sequences,
    true,
    wait_until,
)


def test_a_round_of_sequences_in_a_row_is_one_request(far):
    origin = far.put("a", MIB)
    wanted = sequences(origin, range(10, 200))
    random.Random(0).shuffle(wanted)
    assert requests_for(far, Streams(Network()), wanted) == [("a", 10 * 4 * KIB, 200 * 4 * KIB)]


def test_shuffled_sequences_fetch_at_most_twice_their_bytes(far):
    origin = far.put("a", 16 * MIB)
    for share in (0.01, 0.1, 0.3, 0.6):
        far.asked.clear()
        count = 16 * MIB // (4 * KIB)
        chosen = random.Random(0).sample(range(count), int(share * count))
        Streams(Network()).read(sequences(origin, chosen))
        assert far.fetched <= 2 * len(chosen) * 4 * KIB
        assert len(far.asked) <= len(chosen)


def test_a_gap_is_fetched_only_where_it_is_shorter_than_what_follows(far):
    origin = far.put("a", MIB)
    wanted = [(origin, 0, 100), (origin, 200, 300), (origin, 401, 501)]
    assert requests_for(far, Streams(Network()), wanted) == [("a", 0, 300), ("a", 401, 501)]
    far_off = 100_000 + GAP_BYTES + 1
    wanted = [(origin, 0, 100_000), (origin, far_off, far_off + 100_000)]
    asked = sorted(requests_for(far, Streams(Network()), wanted))
    assert asked == [("a", start, stop) for _, start, stop in wanted]


def test_connections_share_a_long_range_and_are_never_more(far):
    far.piece, origin = 100_000, far.put("a", 12 * REQUEST_BYTES)
    far.fault = lambda *_: time.sleep(0.005)
    streams = Streams(Network(connections=3))
    assert streams.read([(origin, 5, origin.size)]) == true(far, [(origin, 5, origin.size)])
    assert far.most == 3
    assert all(stop - start <= REQUEST_BYTES for _, start, stop in far.asked)
    assert far.fetched == origin.size - 5


def test_what_was_expected_is_read_without_a_request_and_nothing_comes_twice(far):
    origin, streams = far.put("a", MIB), Streams(Network())
    first, second = sequences(origin, range(0, 90, 2)), sequences(origin, range(90, 200))
    streams.expect(first)
    streams.expect(second)
    streams.expect(first + second)
    rested(streams)
    asked = list(far.asked)
    assert sum(stop - start for _, start, stop in asked) <= 2 * 155 * 4 * KIB
    assert streams.read(second + first) == true(far, second + first)
    assert streams.read(first) == true(far, first)
    streams.expect(first)
    rested(streams)
    assert far.asked == asked


def test_expect_returns_at_once_and_a_read_waits_for_what_is_under_way(far, gate):
    origin, streams = far.put("a", 50_000), Streams(Network())
    far.fault = lambda *_: gate.wait(SECONDS)
    wanted = [(origin, 0, 50_000)]
    streams.expect(wanted)
    wait_until(lambda: far.asked)
    streams.expect(wanted)
    threading.Timer(0.1, gate.set).start()
    assert streams.read(wanted) == true(far, wanted)
    assert far.asked == [("a", 0, 50_000)]


def test_a_read_goes_before_what_is_only_expected(far, gate):
    origins = [far.put(f"f{number}", 5_000) for number in range(9)]
    streams = Streams(Network(connections=1))
    far.fault = lambda *_: gate.wait(SECONDS)
    streams.expect([(origin, 0, 5_000) for origin in origins])
    wait_until(lambda: far.asked)
    threading.Timer(0.1, gate.set).start()
    streams.read([(origins[7], 0, 5_000), (origins[4], 0, 9)])
    rested(streams)
    assert [url[1:] for url, *_ in far.asked] == list("0741234568")
