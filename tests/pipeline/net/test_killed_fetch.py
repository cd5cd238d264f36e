"""A download that is killed at any moment goes on where it stopped, and fetches nothing twice."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomlkit

from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.token_servers import KINDS, Source
from tests.servers.files import Files

pytestmark = pytest.mark.long

SIZE = 500_000  # bytes of each of the three files
BYTES_PER_SECOND = 400_000  # of each download
# What a kill can cost a file: what the server had written and the process had not read.
LOST_BYTES = 2**16


@pytest.fixture
def shards() -> sources.Shards:
    return sources.make_shards(5, SIZE)


@pytest.fixture
def source(request, shards, tmp_path, monkeypatch):
    """A slow server of each kind."""
    with sources.serving(request.param, shards, tmp_path / "home", monkeypatch) as found:
        found.server.bytes_per_second = BYTES_PER_SECOND
        yield found


def start(source: Source, folder: Path) -> subprocess.Popen:
    """The stage in a process of its own; its project is the folder."""
    run = folder / "run.toml"
    run.write_text(tomlkit.dumps(sources.document(source.location, stall_seconds=20)))
    return tiny.lockstep("download", run, folder)


def sent(source: Source) -> int:
    with source.server.lock:
        return sum(source.server.sent.values())


def stored(folder: Path) -> int:
    """Bytes of the files in the store."""
    return sum(map(len, tiny.contents(folder / "data" / "store" / "files").values()))


def kill_at(process: subprocess.Popen, source: Source, count: int) -> None:
    """Kills a process when the server has sent so many bytes."""
    while sent(source) < count and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def finish(process: subprocess.Popen) -> None:
    output = process.communicate()[0]
    assert process.returncode == 0, output


@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_killed_fetch_goes_on_where_it_stopped(source, shards, tmp_path):
    size = sum(map(len, shards.values()))
    kill_at(start(source, tmp_path), source, size // 2)
    assert not (tmp_path / "data" / "shards").exists()
    sources.check_store(tmp_path, shards)
    kept = stored(tmp_path)
    lost = sent(source) - kept  # more where the process had no time to read what came
    finish(start(source, tmp_path))
    sources.check(tmp_path / "data" / "shards", shards)
    sources.check_store(tmp_path, shards)
    twice = sent(source) - size
    assert 0 <= twice <= lost + len(shards) * LOST_BYTES, (twice, lost, kept)
    assert not list((tmp_path / "data" / "store").rglob("*.part"))


# Fetches and ends, without what a stage does before and after: many can be killed in a second.
PROGRAM = """
import json, sys
from pathlib import Path
from pipeline.net.transfers.store import Transfer, fetch
from pipeline.runfile import Network
from lockstep.machine.progress import Progress
from pipeline.net.origin import Origin

origins = [Origin(url=url, size=size, tag=tag) for url, size, tag in json.loads(sys.argv[1])]
wishes = [Transfer(origin.url, origin, origin.size) for origin in origins]
with Progress("fetch", total=sum(wish.size for wish in wishes), unit="byte") as bar:
    for kept in fetch(wishes, Path(sys.argv[2]), Network(), bar):
        print(kept.sha256)
"""


def test_many_kills_at_any_moment_lose_nothing_that_came(shards, tmp_path):
    rng = random.Random(9)
    with Files(shards, bytes_per_second=BYTES_PER_SECOND).serving() as files:
        wishes = json.dumps([(files.url(n), len(shards[n]), files.tags[n]) for n in shards])
        command = [sys.executable, "-c", PROGRAM, wishes, tmp_path / "data" / "store"]
        kills, output = 0, None
        while output is None:
            process = subprocess.Popen(
                command, cwd=PROJECT, env=tiny.environment(PROJECT), stdout=subprocess.PIPE
            )
            try:  # from before it has begun to after it has ended; later where a start takes longer
                patience = rng.uniform(0.2, 0.6) + 0.1 * kills
                output = process.communicate(timeout=patience)[0].decode()
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
            sources.check_store(tmp_path, shards)
        found = [hashlib.sha256(content).hexdigest() for content in shards.values()]
    assert process.returncode == 0
    assert output.split() == found
    assert kills > 1
    twice = sum(files.sent.values()) - sum(map(len, shards.values()))
    assert 0 <= twice <= kills * len(shards) * LOST_BYTES, (twice, kills)


@pytest.mark.parametrize("source", ["plain"], indirect=True)
def test_two_at_once_fetch_each_byte_once(source, shards, tmp_path):
    roots = [tmp_path / name for name in ("one", "other")]
    store = tmp_path / "data" / "store"
    store.mkdir(parents=True)
    for root in roots:
        (root / "data").mkdir(parents=True)
        (root / "data" / "store").symlink_to(store)
    processes = [start(source, root) for root in roots]
    for process, root in zip(processes, roots, strict=True):
        finish(process)
        sources.check(root / "data" / "shards", shards)
    assert sent(source) == sum(map(len, shards.values()))
