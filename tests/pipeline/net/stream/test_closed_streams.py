"""The end: streams that are closed or dropped ask for no more."""

import gc
import threading
import time
import weakref

from pipeline.net.transfers import stream
from pipeline.net.transfers.stream import Streams
from pipeline.runfile import Network
from tests.pipeline.net.stream.far import SECONDS, cut, refused, rested, wait_until


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
