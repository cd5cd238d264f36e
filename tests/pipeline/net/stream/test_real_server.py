"""Streams from a real server, which sends wrong versions, or nothing."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from pipeline.net.origin import Origin
from pipeline.net.transfers.stream import Streams
from pipeline.runfile import Network
from tests.pipeline.net.stream.far import MIB, SECONDS, holding, refused, wait_until
from tests.servers import misbehaviour
from tests.servers.files import Files
from tests.servers.misbehaviour import Misbehaviour

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
    files = {"a.ds": random.Random(0).randbytes(3 * MIB), "b.ds": random.Random(1).randbytes(9_999)}
    with Files(files=files).serving() as server:
        yield server


def origin_of(served: Files, name: str) -> Origin:
    return Origin(url=served.url(name), size=len(served.files[name]), tag=served.tags[name])


def test_random_ranges_of_a_server_are_the_files_bytes(served):
    origins, chosen = [origin_of(served, name) for name in ("a.ds", "b.ds")], random.Random(0)
    how = holding(MIB, 8)
    streams = Streams(how)
    for _ in range(20):
        wanted = []
        for _ in range(chosen.randrange(12)):
            origin = chosen.choice(origins)
            start = chosen.randrange(origin.size)
            wanted.append((origin, start, min(origin.size, start + chosen.randrange(300_000))))
        streams.expect(wanted[::2])
        got = streams.read(wanted)
        names = ["a.ds" if origin is origins[0] else "b.ds" for origin, *_ in wanted]
        ranges = [slice(start, stop) for _, start, stop in wanted]
        assert got == [served.files[name][cut] for name, cut in zip(names, ranges, strict=True)]
        assert streams.held_bytes <= how.cache_bytes


def test_a_range_of_an_unnamed_version_is_refused_from_the_first_byte_on(served):
    origin = origin_of(served, "a.ds")
    served.faults.append(Misbehaviour(misbehaviour.untagged))
    for start in (0, 5_000):
        message = refused(Streams(Network()), (origin, start, start + 9))
        assert message.endswith(f", expected {origin.tag!r} as before")
    unnamed = origin.model_copy(update={"tag": None})
    assert "expected an ETag or a date" in refused(Streams(Network()), (unnamed, 0, 9))


@pytest.mark.parametrize("how", ["expect", "read"])
def test_a_process_ends_at_once_while_requests_hang(served, how):
    served.faults.append(Misbehaviour(misbehaviour.silent))
    origin = origin_of(served, "a.ds")
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
