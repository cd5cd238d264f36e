"""What is asked for again after a failure: when, and no more than is missing."""

import shutil

import pytest

from lockstep.errors import LockstepError
from pipeline.net import limits
from tests import tiny
from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.faults.matrix import RIGHT, YEAR
from tests.pipeline.net.faults.outcome import each_kind, outcome, pin_of, spoil
from tests.pipeline.net.token_servers import TRUTH
from tests.servers import misbehaviour as m


@pytest.mark.parametrize(
    ("retry_after", "least", "most"),
    [("7", 7, 7), (YEAR, 30, 30), ("a date", 1, 3), ("soon", 0, 0), ("-7", 0, 0)],
)
@pytest.mark.parametrize("source", ["plain"], indirect=True)
def test_a_server_is_asked_again_when_it_says_but_not_in_a_year(
    source, root, monkeypatch, retry_after, least, most
):
    waited = []
    monkeypatch.setattr(limits, "pause", lambda seconds, _: waited.append(seconds))
    header = m.soon() if retry_after == "a date" else retry_after
    spoil(source, m.status(503, header))
    assert outcome(source, root) == RIGHT
    assert len(waited) == 1
    assert least <= waited[0] <= most


@pytest.mark.parametrize("source", ["plain"], indirect=True)
def test_a_part_of_a_file_that_came_damaged_is_fetched_again(source, root, tmp_path):
    limit = {"tokens": 25_000}  # all of 0.ds, and of 1.ds the first
    pin = pin_of(source, tmp_path / "pinned", limit)
    spoil(source, m.flipped)
    with pytest.raises(LockstepError, match=r"\[pins\] data = "):
        sources.fetch(source.location, root, pin, limit)
    folder = sources.fetch(source.location, root, pin, limit)
    train = b"".join(path.read_bytes() for path in sorted((folder / "train").iterdir()))
    assert train == (TRUTH["0.ds"] + TRUTH["1.ds"])[:50_000]


@each_kind
def test_an_earlier_result_is_whole_after_a_failure(source, root):
    before = tiny.contents(sources.fetch(source.location, root))
    shutil.rmtree(root / "data" / "store")
    spoil(source, m.dropped)
    spoil(source, m.refused, times=None, after=1)
    with pytest.raises(LockstepError, match="run again to resume"):
        sources.fetch(source.location, root)
    assert tiny.contents(root / "data" / "shards") == before


@each_kind
def test_what_came_before_a_failure_is_not_fetched_again(source, root):
    spoil(source, m.truncated)
    spoil(source, m.refused, times=None, after=1)
    assert "run again to resume" in outcome(source, root)
    source.server.faults.clear()
    assert outcome(source, root) == RIGHT
    assert sorted(source.server.sent.values()) == sorted(map(len, TRUTH.values()))
