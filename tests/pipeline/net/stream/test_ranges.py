"""What is read: any ranges, in bounded memory, are the bytes of their files."""

import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.net import remote
from pipeline.net.origin import Origin
from pipeline.net.transfers.stream import Streams
from pipeline.runfile import Network
from tests.pipeline.net.stream.far import (
    SECONDS,
    Far,
    holding,
    refused,
    rested,
    sequences,
    true,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ranges_are_the_files_bytes_in_any_memory(data):
    far, sizes = Far(), (1, 999, 6_000)
    origins = [far.put(f"f{size}", size) for size in sizes]
    how = Network(
        connections=data.draw(st.integers(1, 5)),
        stream_cache_mb=data.draw(st.sampled_from([1e-6, 1e-4, 7e-4, 3e-3, 1.0])),
    )
    if how.cache_bytes == 1:  # each byte is a request
        origins = origins[:1]

    def ranges() -> list[tuple[Origin, int, int]]:
        chosen = data.draw(st.lists(st.sampled_from(origins), max_size=6))
        ends = [sorted((data.draw(st.integers(0, o.size)), data.draw(st.integers(0, o.size))))
                for o in chosen]  # fmt: skip
        return [(origin, *both) for origin, both in zip(chosen, ends, strict=True)]

    beyond = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "read_once", far.read_once)
        streams = Streams(how)
        far.fault = lambda *_: streams.held_bytes > how.cache_bytes and beyond.append(1)
        for _ in range(4):
            if data.draw(st.booleans()):
                streams.expect(ranges())
            wanted = ranges()
            assert streams.read(wanted) == true(far, wanted)
            assert streams.held_bytes <= how.cache_bytes
        rested(streams)
    assert not beyond and far.most <= how.connections
    assert streams.held_bytes == sum(map(len, streams._pieces.values()))


def test_threads_that_each_read_more_than_the_memory_all_get_their_bytes(far):
    origin, how = far.put("a", 500_000), holding(30_000, 3)
    streams, got = Streams(how), {}

    def run(seed: int) -> None:
        chosen = random.Random(seed)
        for _ in range(5):
            wanted = sequences(origin, chosen.sample(range(120), 30))
            streams.expect(sequences(origin, chosen.sample(range(120), 30)))
            got.setdefault(seed, []).append(streams.read(wanted) == true(far, wanted))

    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert got == {seed: [True] * 5 for seed in range(6)}
    assert rested(streams).held_bytes <= how.cache_bytes and far.most <= 3


def test_another_version_of_a_file_is_another_file(far):
    origin, streams = far.put("a", 5_000, tag='"1"'), Streams(Network())
    before = streams.read([(origin, 0, 5_000)])
    far.files["a"] = bytes(5_000)
    assert streams.read([(origin.model_copy(update={"tag": '"2"'}), 0, 5_000)]) == [bytes(5_000)]
    assert streams.read([(origin, 0, 5_000)]) == before


def test_a_range_outside_its_file_is_refused_before_anything_is_asked(far):
    origin, streams = far.put("https://me:secret@far/a.ds", 5_000), Streams(Network())
    message = "https://far/a.ds: bytes 4000 to 5001 requested, expected a range of its 5000 bytes"
    assert refused(streams, (origin, 0, 10), (origin, 4_000, 5_001)) == message
    assert not far.asked
