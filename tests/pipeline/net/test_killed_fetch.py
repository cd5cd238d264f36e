"""A download that is killed at any moment goes on where it stopped, and fetches nothing twice."""

import hashlib
import json
import random
import subprocess
import sys

import pytest
import tomlkit

from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.pipeline.net import token_servers as sources
from tests.servers.files import Files

pytestmark = pytest.mark.long

SIZE = 500_000  # bytes of each of the three files
BYTES_PER_SECOND = 400_000  # of each download
# What a kill can cost a file: what the server had written and the process had not read.
LOST_BYTES = 2**16


@pytest.fixture
def shards() -> sources.Shards:
    return sources.make_shards(5, SIZE)


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


def test_two_stages_at_once_fetch_each_byte_once(shards, tmp_path, monkeypatch):
    (store := tmp_path / "data" / "store").mkdir(parents=True)
    run, roots = tmp_path / "run.toml", [tmp_path / name for name in ("one", "other")]
    with sources.serving("plain", shards, tmp_path / "home", monkeypatch) as source:
        source.server.bytes_per_second = BYTES_PER_SECOND
        run.write_text(tomlkit.dumps(sources.document(source.location, stall_seconds=20)))
        for root in roots:
            (root / "data").mkdir(parents=True)
            (root / "data" / "store").symlink_to(store)
        processes = [tiny.lockstep("download", run, root) for root in roots]
        for process, root in zip(processes, roots, strict=True):
            output = process.communicate()[0]
            assert process.returncode == 0, output
            sources.check(root / "data" / "shards", shards)
        assert sum(source.server.sent.values()) == sum(map(len, shards.values()))
