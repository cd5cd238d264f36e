"""What is kept: what is expected, then what was read last."""

from pipeline.net.transfers.stream import Streams
from tests.pipeline.net.stream.far import (
    KIB,
    MIB,
    holding,
    requests_for,
    rested,
    sequences,
    true,
)


def test_what_was_read_longest_ago_is_forgotten_first(far):
    origin, streams = far.put("a", MIB), Streams(holding(3_000, 1))
    one, two, three, four = ([(origin, at, at + 1_000)] for at in (0, 100_000, 200_000, 300_000))
    for wanted in (one, two, three, one, four):  # two goes
        streams.read(wanted)
    assert requests_for(far, streams, one, three, four) == []
    assert requests_for(far, streams, two) == [("a", 100_000, 101_000)]


def test_expecting_displaces_what_was_read_and_never_what_was_expected(far):
    origin, how = far.put("a", MIB), holding(10 * 4 * KIB, 1)
    streams = Streams(how)
    streams.read(sequences(origin, range(10)))
    streams.expect(sequences(origin, range(100, 106)))
    streams.expect(sequences(origin, range(200, 206)))  # four of them have room
    rested(streams)
    streams.expect(sequences(origin, range(50, 60)))  # none of these
    assert rested(streams).held_bytes == how.cache_bytes
    assert not requests_for(far, streams, sequences(origin, [*range(100, 106), *range(200, 204)]))


def test_a_read_displaces_what_was_read_before_what_is_expected(far):
    origin, streams = far.put("a", MIB), Streams(holding(4 * 4 * KIB, 1))
    streams.expect(sequences(origin, [10, 20]))
    rested(streams)
    for number in (30, 40, 50, 60):
        streams.read(sequences(origin, [number]))
    assert not requests_for(far, streams, sequences(origin, [10, 20]))


def test_expected_again_what_was_read_before_stays(far):
    origin, streams = far.put("a", MIB), Streams(holding(4 * 4 * KIB, 1))
    streams.read(sequences(origin, range(4)))
    streams.expect(sequences(origin, [0, 1, 20, 21]))
    rested(streams)
    assert not requests_for(far, streams, sequences(origin, [0, 1, 20, 21]))


def test_a_read_larger_than_the_memory_uses_first_what_is_there(far):
    origin, streams = far.put("a", MIB), Streams(holding(8 * 4 * KIB, 2))
    streams.expect(sequences(origin, range(50, 58)))
    rested(streams)
    wanted = sequences(origin, range(58))
    assert streams.read(wanted) == true(far, wanted)
    assert far.fetched == 58 * 4 * KIB
