"""A file that is replaced while it is read is never half of each."""

import dataclasses

import pytest

from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.faults.matrix import CHANGED, RIGHT, UNNAMED
from tests.pipeline.net.faults.outcome import each_kind, outcome, spoil
from tests.pipeline.net.token_servers import OTHER
from tests.servers import misbehaviour as m
from tests.servers.misbehaviour import Misbehaviour

SUNDAY = "Sun, 06 Nov 1994 08:49:37 GMT"


@each_kind
def test_a_file_that_is_replaced_while_it_is_read_is_never_half_of_each(source, request, root):
    fault = spoil(source, m.meanwhile(lambda: source.put(OTHER)))
    kind = request.node.callspec.params["source"]
    if kind == "plain":
        assert CHANGED in outcome(source, root)
    else:  # a commit is for good, and this bucket keeps what is overwritten
        assert outcome(source, root) == RIGHT
    assert fault.hits == 1
    sources.check(sources.fetch(source.location, root), OTHER)


@pytest.mark.parametrize("says", ["", "Last-Modified"])
@pytest.mark.parametrize("source", ["plain"], indirect=True)
def test_nor_where_the_server_does_not_say_of_which_version_the_rest_is(source, root, says):
    """In the same process, or in the next one."""

    def date(answer):
        answer = m.untagged(answer)
        return dataclasses.replace(answer, headers=answer.headers | {says: SUNDAY} if says else {})

    tags = date if says else m.untagged
    source.server.faults.append(Misbehaviour(tags, where=source.places["listing"]))
    spoil(source, m.untagged, times=None)
    replaced = spoil(source, m.meanwhile(lambda: source.server.put("d/1.ds", OTHER["1.ds"])))
    folder = sources.fetch(source.location, root)
    assert replaced.hits == 1
    assert (folder / "train" / "00001.ds").read_bytes() == OTHER["1.ds"]


@pytest.mark.parametrize("source", ["plain"], indirect=True)
def test_what_an_earlier_run_began_is_not_completed_from_an_unnamed_version(source, root):
    source.server.faults.append(Misbehaviour(m.untagged, where="1.ds"))
    spoil(source, m.dropped, times=None)
    assert UNNAMED["plain"] in outcome(source, root)
    assert list((root / "data" / "store" / "files").rglob("*.part"))
    source.server.put("d/1.ds", OTHER["1.ds"])
    source.server.faults.pop()
    folder = sources.fetch(source.location, root)
    assert (folder / "train" / "00001.ds").read_bytes() == OTHER["1.ds"]


@pytest.mark.parametrize("source", ["bucket"], indirect=True)
def test_a_file_that_is_gone_from_a_bucket_without_versions_is_an_error(source, root):
    source.server.versioned = False
    spoil(source, m.meanwhile(lambda: source.put(OTHER)))
    assert "answered 404" in outcome(source, root)
    sources.check(sources.fetch(source.location, root), OTHER)
