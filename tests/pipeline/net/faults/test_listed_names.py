"""Names that a server lists: strange ones are fetched, those that lead elsewhere are not."""

import pytest

from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.faults.outcome import outcome
from tests.pipeline.net.token_servers import TRUTH

BAD_PATHS = ("../x.ds", "a/../../x.ds", "/etc/x.ds", "a//x.ds", "a\\..\\x.ds", "./x.ds")
BAD_NAMES = (*BAD_PATHS, "a\nb.ds", "a\x00b.ds", "\x1b[2Jx.ds", "\u202egnp.ds")


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
@pytest.mark.parametrize("source", ["hub", "bucket"], indirect=True)
def test_a_name_that_is_no_path_in_a_folder_is_refused_and_nothing_is_written(source, root, name):
    source.put(TRUTH | {name: b"tokens"})
    if isinstance(source.server, sources.hub_server.Hub):
        files = source.server.datasets[sources.DATASET].files
        files[name] = files.pop(f"d/{name}")
    message = outcome(source, root)
    assert f"lists a file named {name!r}, expected a path inside it" in message
    assert not (root / "data" / "store" / "files").exists()


@pytest.mark.parametrize("source", ["hub"], indirect=True)
def test_a_link_in_a_repository_is_a_file_that_says_where_and_is_not_followed(source, root):
    linked = TRUTH | {"link.ds": b"../../../../../etc/passwd\n"}
    source.put(linked)
    sources.check(sources.fetch(source.location, root), linked)


@pytest.mark.parametrize("name", ["x" * 250 + ".ds", "ä b+c%2e#?.ds", "a/b/c/d.ds"])
@pytest.mark.parametrize("source", ["hub", "bucket"], indirect=True)
def test_a_strange_name_is_fetched_all_the_same(source, root, name):
    shards = {"0.ds": TRUTH["0.ds"], name: TRUTH["1.ds"], "zz.ds": TRUTH["2.ds"]}
    for stored in (getattr(source.server, "objects", {}), getattr(source.server, "commits", {})):
        stored.clear()
    source.put(shards)
    sources.check(sources.fetch(source.location, root), dict(sorted(shards.items())))
