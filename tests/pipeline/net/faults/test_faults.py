"""Servers that do something wrong: the exact bytes, or one clear error; no secret is shown."""

import dataclasses
import json
import logging
import random
import re
import signal
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json
from pipeline.net import limits
from tests import tiny
from tests.errors import refused
from tests.linear import in_time
from tests.pipeline.net import token_servers as sources
from tests.pipeline.net.faults.matrix import CHANGED, MATRIX, RIGHT, UNNAMED, YEAR
from tests.pipeline.net.token_servers import (
    HUB_TOKEN,
    KINDS,
    OTHER,
    PASSWORD,
    SECRETS,
    TRUTH,
    Source,
)
from tests.servers import misbehaviour as m
from tests.servers.files import Files
from tests.servers.misbehaviour import Misbehaviour, Spoil

pytestmark = pytest.mark.long

IN_TIME = 8  # seconds: a server that says nothing is left after half a second, three times


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    """Waits of hundredths of a second between attempts, whatever they should be."""
    brief = lambda seconds, cancelled: cancelled.wait(min(seconds, 0.02))  # noqa: E731
    monkeypatch.setattr(limits, "pause", brief)


@pytest.fixture(autouse=True)
def ends_in_time():
    """No server keeps a client for ever."""
    with in_time(IN_TIME):
        yield


@pytest.fixture
def source(request, tmp_path, monkeypatch):
    """A server of the kind that is asked for."""
    with sources.serving(request.param, TRUTH, tmp_path / "home", monkeypatch) as found:
        yield found


@pytest.fixture
def root(tmp_path) -> Path:
    """A project, with nothing beside it but what belongs to the servers."""
    (folder := tmp_path / "project").mkdir()
    return folder


each_kind = pytest.mark.parametrize("source", KINDS, indirect=True)


def spoil(source: Source, wrong: Spoil, **how: int | None) -> Misbehaviour:
    """What a server does wrong with the bytes of 1.ds; once, unless something else is said."""
    fault = Misbehaviour(wrong, where=source.places["bytes"], **({"times": 1} | how))
    source.server.faults.append(fault)
    return fault


def outcome(source: Source, root: Path, pin: str = "") -> str:
    """Runs the stage; the error's words, or RIGHT. Whatever comes, nothing wrong lies anywhere."""
    outside = elsewhere(root)
    try:
        folder = sources.fetch(source.location, root, pin)
    except LockstepError as error:
        message = str(error)
        assert message and message.isprintable(), "one line"
        assert not any(secret in message for secret in SECRETS), message
        assert "1.ds" in message or "ours" in message or source.server.address[7:] in message, (
            message
        )
        assert not (root / "data" / "shards").exists()
    else:
        message = RIGHT
        sources.check(folder, TRUTH)
    assert elsewhere(root) == outside
    return message


def elsewhere(root: Path) -> dict[str, bytes]:
    """What lies around a project's data."""
    inside = f"{root.relative_to(root.parent)}/data/"
    files = tiny.contents(root.parent).items()
    return {name: content for name, content in files if not name.startswith(inside)}


def pin_of(source: Source, root: Path, limit: dict | None = None) -> str:
    folder = sources.fetch(source.location, root, limit=limit)
    return read_json(folder / "shards.json")["source"]["sha256"]


# ---- Each row of the matrix with each kind of server: the exact bytes, or one clear error ----


@pytest.mark.parametrize(
    ("row", "source"),
    [
        pytest.param(row, kind, id=f"{kind}: {row.what}")
        for row in MATRIX
        for kind in KINDS
        if row.of(kind) is not None
    ],
    indirect=["source"],
)
def test_the_bytes_come_right_or_one_line_says_why_and_the_next_run_is_right(
    row, source, request, root, tmp_path, caplog, capfd
):
    caplog.set_level(logging.DEBUG)
    for library in ("urllib3", "httpx2", "httpcore2"):  # as the command does
        caplog.set_level(logging.WARNING, library)
    kind = request.node.callspec.params["source"]
    pin = pin_of(source, tmp_path / "pinned") if row.pinned else ""
    faults = [dataclasses.replace(f, where=source.places[row.where]) for f in row.faults]
    source.server.faults = list(faults)
    message = outcome(source, root, pin)
    assert all(fault.hits for fault in faults), "it happened"
    assert bool(message) == bool(row.of(kind))
    assert row.of(kind) in message
    if not row.pinned:  # until it is compared with its pin, nothing is known against it
        sources.check_store(root, TRUTH)
    source.server.faults.clear()
    assert outcome(source, root, pin) == RIGHT
    printed = capfd.readouterr()
    for secret in SECRETS:
        assert secret not in caplog.text + printed.out + printed.err
        for name, content in tiny.contents(root / "data" / "shards").items():
            assert secret.encode() not in content, name


# Not of bytes that are wrong where no checksum tells.
SPOILS = [
    *(m.refused, m.silent, m.not_http, m.dropped, m.truncated, m.stalled, m.trickling),
    *(m.hinted, m.always_100, m.long_headers, m.slow_headers, m.endless_redirect),
    *(m.redirected(), m.redirected("http://[::"), m.sign_in(), m.sign_in(None)),
    *(m.status(code) for code in (204, 403, 404, 416, 429, 500, 503)),
    *(m.shorter, m.longer, m.too_much, m.endless, m.chunked, m.no_length, m.other_size(2)),
    *(m.whole, m.other_range, m.compressed, m.identity, m.untagged, m.other_tag, m.itself_again),
]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("source", KINDS, indirect=True)
def test_any_faults_together_end_in_the_right_bytes_or_in_one_line(source, root, seed):
    rng = random.Random(seed)
    source.server.faults += [
        Misbehaviour(
            rng.choice(SPOILS),
            times=rng.choice([1, 1, 2, None]),
            where=rng.choice(["", "^HEAD", "^GET", *source.places.values()]),
            after=rng.choice([0, 0, 1, 3]),
        )
        for _ in range(rng.randint(1, 3))
    ]
    signal.alarm(IN_TIME * (1 + len(source.server.faults)))  # each fault takes its own silences
    outcome(source, root)
    sources.check_store(root, TRUTH)
    source.server.faults.clear()
    assert outcome(source, root) == RIGHT


# ---- What is asked for again after a failure: when, and no more than is missing ----


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
    with refused("[pins] data", pin):
        sources.fetch(source.location, root, pin, limit)
    folder = sources.fetch(source.location, root, pin, limit)
    train = b"".join(path.read_bytes() for path in sorted((folder / "train").iterdir()))
    assert train == (TRUTH["0.ds"] + TRUTH["1.ds"])[:50_000]


@each_kind
def test_what_came_before_a_failure_is_not_fetched_again(source, root):
    spoil(source, m.truncated)
    spoil(source, m.refused, times=None, after=1)
    assert "run again to resume" in outcome(source, root)
    source.server.faults.clear()
    assert outcome(source, root) == RIGHT
    # the other files may have been on their way when the first failure ended all
    (sent,) = (count for name, count in source.server.sent.items() if name.endswith("1.ds"))
    assert sent == len(TRUTH["1.ds"])


# ---- A file that is replaced while it is read is never half of each ----

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


# ---- Names that a server lists: strange ones are fetched, those that lead elsewhere are not ----

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


# ---- What a request has of secrets is for one server, and is shown to nobody ----

ECHO = "\x1b[2J \u202e %s"


def echoed(source: Source, where: str) -> Spoil:
    """Repeats what it was sent, with codes that steer a terminal, in a place of the answer."""
    word = ECHO % (HUB_TOKEN if isinstance(source.server, sources.hub_server.Hub) else PASSWORD)

    def spoil(answer):
        headers = {where: word.encode().decode("latin-1")}
        match where:
            case "reason":
                return dataclasses.replace(answer, status=403, reason=headers[where])
            case "path" | "oid" | "sha":
                text = bytes(answer.body).decode()
                body = re.sub(
                    f'"{where}": "[^"]*"', lambda _: f'"{where}": {json.dumps(word)}', text
                )
                size = {"Content-Length": str(len(body))}
                return dataclasses.replace(
                    answer, body=body.encode(), headers=answer.headers | size
                )
            case "Content-Range":
                return dataclasses.replace(answer, status=206, headers=answer.headers | headers)
        return dataclasses.replace(answer, headers=answer.headers | headers)

    return spoil


@pytest.mark.parametrize(
    ("source", "where", "of"),
    [
        ("hub", "path", "listing"),
        ("hub", "oid", "listing"),
        ("hub", "sha", "listing"),
        ("plain", "reason", "bytes"),
        ("plain", "ETag", "bytes"),
        ("plain", "ETag", "listing"),
        ("plain", "Content-Range", "bytes"),
    ],
    indirect=["source"],
)
def test_what_a_server_repeats_of_a_request_is_not_shown(source, root, where, of):
    fault = Misbehaviour(echoed(source, where), where=source.places[of])
    source.server.faults.append(fault)
    message = outcome(source, root)  # one printable line, without any of SECRETS
    assert message and fault.hits


@each_kind
def test_credentials_are_for_one_server(source, request, root):
    content = TRUTH["1.ds"]
    with Files({"1.ds": content}).serving() as other:
        spoil(source, m.redirected(other.url("1.ds?Signature=hf_sentinel")), times=None)
        # whose files they are is known by checksums, where there are any
        if request.node.callspec.params["source"] == "plain":
            other.tags["1.ds"] = source.server.tags["d/1.ds"]
        assert outcome(source, root) == RIGHT
        assert [(authorization, method) for method, _, authorization in other.seen] == [
            (None, "GET")
        ]
