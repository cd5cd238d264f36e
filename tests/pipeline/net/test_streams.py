"""Streams of ranges: the right bytes, few requests, bounded memory, and an end."""

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from pipeline.net import limits, remote
from pipeline.net.limits import TransientError
from pipeline.net.origin import Origin
from pipeline.net.transfers import stream
from pipeline.net.transfers.stream import GAP_BYTES, REQUEST_BYTES, Streams
from pipeline.runfile import Network
from tests.pipeline.sources.options import refusal
from tests.servers import misbehaviour
from tests.servers.files import Files
from tests.servers.misbehaviour import Misbehaviour

KIB, MIB = 2**10, 2**20
SECONDS = 20.0  # after which a test that waits has failed


def holding(cache_bytes: int, connections: int) -> Network:
    """The network of a run that may hold so many bytes."""
    return Network(connections=connections, stream_cache_mb=cache_bytes / 10**6)


class Far:
    """Files far away, in place of `remote.read_once`."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[tuple[str, int, int]] = []  # (url, start, stop) of each request
        # before each piece of an answer; may raise
        self.fault: Callable[[str, int], object] = lambda url, at: None
        self.piece, self.running, self.most = 1000, 0, 0  # most: requests that ran at once
        self.lock = threading.Lock()

    def put(self, url: str, size: int, tag: str | None = None) -> Origin:
        self.files[url] = random.Random(url).randbytes(size)
        return Origin(url=url, size=size, tag=tag)

    @property
    def fetched(self) -> int:
        return sum(stop - start for _, start, stop in self.asked)

    def read_once(self, origin: Origin, start: int, stop: int, *_: object) -> Iterator[bytes]:
        with self.lock:
            self.asked.append((origin.url, start, stop))
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            for at in range(start, stop, self.piece):
                self.fault(origin.url, at)
                yield self.files[origin.url][at : min(at + self.piece, stop)]
        finally:
            with self.lock:
                self.running -= 1


def cut(*_: object) -> None:
    raise TransientError("a: cut", retry_after="0")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def rested(streams: Streams) -> Streams:
    """The streams, once nothing is being fetched."""
    wait_until(lambda: streams._workers == 0)
    return streams


def true(far: Far, wanted: list[tuple[Origin, int, int]]) -> list[bytes]:
    return [far.files[origin.url][start:stop] for origin, start, stop in wanted]


def sequences(origin: Origin, numbers, size: int = 4 * KIB) -> list[tuple[Origin, int, int]]:
    return [(origin, number * size, (number + 1) * size) for number in numbers]


def requests_for(far: Far, streams: Streams, *wanted: list[tuple[Origin, int, int]]) -> list:
    """What is asked for when these are read, one after the other."""
    far.asked.clear()
    for ranges in wanted:
        assert streams.read(ranges) == true(far, ranges)
    return far.asked


def refused(streams: Streams, *wanted: tuple[Origin, int, int]) -> str:
    return refusal(streams.read, wanted)


@pytest.fixture
def far(monkeypatch) -> Far:
    far = Far()
    monkeypatch.setattr(remote, "read_once", far.read_once)
    return far


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(limits, "BACKOFF_SECONDS", 0.001)
    monkeypatch.setattr(limits, "JITTER_SECONDS", 0.001)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs waits for this."""
    gate = threading.Event()
    yield gate
    gate.set()


# ---- What is read: any ranges, in bounded memory, are the bytes of their files ----


@settings(max_examples=60)
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


# ---- What is asked for: few requests, nothing twice, and first what a read waits for ----


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


# ---- What is kept: what is expected, then what was read last ----


def test_what_was_read_longest_ago_is_forgotten_first(far):
    origin, streams = far.put("a", MIB), Streams(holding(3_000, 1))
    one, two, three, four = ([(origin, at, at + 1_000)] for at in (0, 100_000, 200_000, 300_000))
    for wanted in (one, two, three, one, four):  # two goes
        streams.read(wanted)
    assert requests_for(far, streams, one, three, four) == []
    assert requests_for(far, streams, two) == [("a", 100_000, 101_000)]


@pytest.mark.parametrize(
    ("room", "steps", "kept"),
    [
        # the second group finds room for four of its six, the third for none
        (10, [("read", range(10)), ("expect", range(100, 106)), ("expect", range(200, 206)),
              ("expect", range(50, 60))], [*range(100, 106), *range(200, 204)]),
        (4, [("expect", [10, 20]), *(("read", [number]) for number in (30, 40, 50, 60))], [10, 20]),
        (4, [("read", range(4)), ("expect", [0, 1, 20, 21])], [0, 1, 20, 21]),
    ],
    ids=["expecting displaces what was read", "so does a read", "expected again it stays"],
)  # fmt: skip
def test_what_is_expected_is_displaced_by_nothing(far, room, steps, kept):
    origin, streams = far.put("a", MIB), Streams(holding(room * 4 * KIB, 1))
    for step, numbers in steps:
        getattr(streams, step)(sequences(origin, numbers))
        rested(streams)
    assert streams.held_bytes == streams.network.cache_bytes
    assert not requests_for(far, streams, sequences(origin, kept))


def test_a_read_larger_than_the_memory_uses_first_what_is_there(far):
    origin, streams = far.put("a", MIB), Streams(holding(8 * 4 * KIB, 2))
    streams.expect(sequences(origin, range(50, 58)))
    rested(streams)
    wanted = sequences(origin, range(58))
    assert streams.read(wanted) == true(far, wanted)
    assert far.fetched == 58 * 4 * KIB


# ---- What goes wrong: a read goes on where it stopped, or says in one line why not ----


def test_a_broken_connection_goes_on_where_it_stopped(far):
    origin, broken = far.put("a", 10_000), []

    def fault(url: str, at: int) -> None:
        if at in (3_000, 7_000) and at not in broken:
            broken.append(at)
            cut()

    far.fault = fault
    assert Streams(Network(attempts=2)).read([(origin, 0, 10_000)]) == [far.files["a"]]
    assert far.asked == [("a", 0, 10_000), ("a", 3_000, 10_000), ("a", 7_000, 10_000)]


def test_an_answer_that_ends_early_counts_as_broken(far, monkeypatch):
    origin = far.put("a", 10_000)
    monkeypatch.setattr(
        remote, "read_once", lambda o, a, b, *_: far.read_once(o, a, min(b, a + 4_000))
    )
    assert Streams(Network(attempts=2)).read([(origin, 0, 10_000)]) == [far.files["a"]]
    far.files["a"] = far.files["a"][:8_000]
    message = refused(Streams(Network(attempts=2)), (origin, 0, 10_000))
    assert message == (
        "a: the answer ended early, expected 2000 more bytes within 2 attempts; run again to resume"
    )


def test_more_bytes_than_asked_for_are_an_error(far, monkeypatch):
    origin = far.put("a", 10_000)
    monkeypatch.setattr(remote, "read_once", lambda o, a, b, *_: far.read_once(o, a, b + 1))
    assert refused(Streams(Network()), (origin, 10, 500)) == (
        "a: 1 bytes more than requested, expected them up to offset 500"
    )
    assert len(far.asked) == 1


def test_what_fails_in_the_background_is_tried_again_by_the_read(far):
    origin, streams = far.put("a", 10_000), Streams(Network(attempts=2))
    works, far.fault = far.fault, cut
    wanted = [(origin, 0, 10_000)]
    streams.expect(wanted)
    rested(streams)
    assert len(far.asked) == 2 and streams.held_bytes == 0
    assert "a: cut, expected 10000 more bytes within 2 attempts" in refused(streams, *wanted)
    assert len(far.asked) == 4
    far.fault = works
    assert streams.read(wanted) == true(far, wanted)


def test_what_a_reader_refuses_is_not_tried_again(far):
    origin, other = far.put("a", 10_000), far.put("b", 10_000)

    def fault(url: str, at: int) -> None:
        if url == "a":
            raise LockstepError("a: changed while it was read")

    far.fault = fault
    streams = Streams(Network())
    assert refused(streams, (other, 0, 500), (origin, 0, 500)) == "a: changed while it was read"
    assert far.asked.count(("a", 0, 500)) == 1
    assert streams.read([(other, 0, 500)]) == true(far, [(other, 0, 500)])
    rested(streams)
    assert all(piece.readers == 0 for piece in streams._pieces.values())


# ---- The end: streams that are closed or dropped ask for no more ----


def test_closed_streams_ask_no_more_and_a_read_that_waits_fails(far, gate):
    origins = [far.put(f"f{number}", 5_000) for number in range(9)]
    streams = Streams(Network(connections=2))
    far.fault = lambda *_: gate.wait(SECONDS)
    streams.expect([(origin, 0, 5_000) for origin in origins])
    threading.Timer(0.1, streams.close).start()
    assert "streams closed" in refused(streams, (origins[0], 0, 5_000), (origins[8], 0, 5_000))
    assert "streams closed" in refused(streams, (origins[0], 0, 1))
    gate.set()
    rested(streams)
    assert len(far.asked) == 2


def test_dropped_streams_are_freed_while_a_request_hangs_and_ask_no_more(far, gate):
    origins = [far.put(f"f{number}", 5_000) for number in range(9)]
    streams = Streams(Network(connections=1))
    far.fault = lambda *_: gate.wait(SECONDS)
    streams.expect([(origin, 0, 5_000) for origin in origins])
    wait_until(lambda: far.asked)
    gc.disable()
    try:
        freed = weakref.ref(streams)
        del streams
        assert freed() is None
    finally:
        gc.enable()
    gate.set()
    wait_until(lambda: far.running == 0)
    time.sleep(0.05)
    assert len(far.asked) == 1


def test_dropped_streams_try_nothing_again(far):
    origin, streams = far.put("a", 5_000), Streams(Network(attempts=10**6))
    far.fault = cut
    streams.expect([(origin, 0, 5_000)])
    wait_until(lambda: len(far.asked) > 1)
    threads = [t for t in threading.enumerate() if t._target is stream._work]
    assert threads
    del streams
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


# ---- A real server, which sends wrong versions, or nothing ----

HANGING = """
import sys, threading
from pipeline.runfile import Network
from pipeline.net.origin import Origin
from pipeline.net.transfers.stream import Streams
streams = Streams(Network())
origin = Origin.model_validate_json(sys.argv[1])
streams.expect([(origin, 0, origin.size)])
if sys.argv[2] == "read":
    threading.Thread(target=streams.read, args=([(origin, 0, 1)],), daemon=True).start()
print("hangs", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def served() -> Iterator[Files]:
    with Files({"a.ds": bytes(9_999)}).serving() as server:
        yield server


def origin_of(served: Files) -> Origin:
    return Origin(url=served.url("a.ds"), size=9_999, tag=served.tags["a.ds"])


def test_a_range_of_an_unnamed_version_is_refused_from_the_first_byte_on(served):
    origin = origin_of(served)
    served.faults.append(Misbehaviour(misbehaviour.untagged))
    for start in (0, 5_000):
        message = refused(Streams(Network()), (origin, start, start + 9))
        assert message.endswith(f", expected {origin.tag!r} as before")
    unnamed = origin.model_copy(update={"tag": None})
    assert "expected an ETag or a date" in refused(Streams(Network()), (unnamed, 0, 9))


@pytest.mark.parametrize("how", ["expect", "read"])
def test_a_process_ends_at_once_while_requests_hang(served, how):
    served.faults.append(Misbehaviour(misbehaviour.silent))
    origin = origin_of(served)
    command = [sys.executable, "-c", HANGING, origin.model_dump_json(), how]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "hangs\n"
    wait_until(lambda: served.seen)
    began = time.monotonic()
    _, errors = process.communicate("\n", timeout=SECONDS)
    assert (process.returncode, errors) == (0, "")
    assert time.monotonic() - began < 5
