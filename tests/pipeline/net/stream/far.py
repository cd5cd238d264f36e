"""Files far away without a network, and what streams make of them."""

import random
import threading
import time
from collections.abc import Callable, Iterator

from pipeline.net.limits import TransientError
from pipeline.net.origin import Origin
from pipeline.net.transfers.stream import Streams
from pipeline.runfile import Network
from tests.pipeline.sources.options import refusal

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
