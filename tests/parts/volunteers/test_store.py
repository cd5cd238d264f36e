"""The four verbs, on every kind of store, and on servers that do them wrong."""

import os
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from lockstep.errors import LockstepError
from parts.volunteers.store.schemes import open_store
from pipeline.net import limits
from tests.errors import refused
from tests.parts.volunteers.stores import RUN, SOON, opened
from tests.servers import misbehaviour as wrong
from tests.servers.misbehaviour import Misbehaviour
from tests.servers.s3 import S3, running_s3

KINDS = "folder", "moto", "s3", pytest.param("ceph", marks=pytest.mark.soak)
NAME = "rounds/00000001/007.record"


@pytest.fixture(params=KINDS)
def store(request, tmp_path, monkeypatch):
    address = request.getfixturevalue("ceph") if request.param == "ceph" else ""
    with opened(request.param, tmp_path / "store", monkeypatch, address) as store:
        yield store


@pytest.fixture
def bucket(monkeypatch):
    with running_s3(monkeypatch) as bucket:
        bucket.pauses = []
        monkeypatch.setattr(limits, "pause", lambda seconds, _: bucket.pauses.append(seconds))
        yield bucket


def over(bucket):
    """The verbs over a server that may do wrong."""
    return open_store(f"s3://{bucket.name}/{RUN}", SOON)


def faulty(bucket, spoil, where, times=1, after=0):
    bucket.faults.append(Misbehaviour(spoil, times, where, after))
    return bucket.faults[-1]


def answering(body, date="Thu, 15 Jan 2026 10:30:00 GMT"):
    headers = {"Content-Length": str(len(body)), "Last-Modified": date}
    return lambda answer: replace(answer, body=body, headers=answer.headers | headers)


# ---- Every store ----


def test_an_object_is_put_once_and_read_with_the_stores_time(store):
    begun = int(time.time())
    assert store.look(NAME, 10) is None
    assert store.create(NAME, b"first") and store.create(NAME, b"first")  # the same bytes have won
    assert not store.create(NAME, b"other") and not store.create(NAME, b"firstfirst")
    seen = store.look(NAME, 10)
    assert (seen.content, begun - 1 <= seen.seconds <= time.time() + 1) == (b"first", True)
    assert store.names("rounds/00000001/") == {NAME: seen.seconds}
    assert store.look(NAME, 5) == seen and store.look(NAME, 4) == seen._replace(content=None)
    assert store.create("empty", b"") and not store.create("empty", b"x")
    assert store.look("empty", 10).content == b""
    store.remove(NAME), store.remove(NAME)
    assert store.look(NAME, 10) is None and store.create(NAME, b"other")


def test_names_are_those_below_a_folder_alone_page_after_page(store):
    inside = {f"rounds/00000001/{number:03}.record" for number in range(7)}
    for name in (*inside, "rounds/00000010/001.record", "rounds/0000000", "run.json"):
        store.create(name, b"x")
    assert store.names("rounds/00000001/").keys() == inside
    assert store.names("peers/") == {}
    with pytest.raises(LockstepError, match="over 6 names, expected at most"):
        store.names("rounds/00000001/", 6)


@pytest.mark.parametrize("address", ["s3://", "ftp://a/b", "file://relative", "a"])
def test_other_addresses_are_refused_in_one_line(address):
    with pytest.raises(LockstepError, match="expected file:///FOLDER, s3://"):
        open_store(address)


def test_no_name_leads_out_of_a_folder_and_no_pipe_or_link_in_it_is_read(tmp_path):
    store = open_store(f"file://{tmp_path / 'store'}")
    with refused("../x"):
        store.create("../x", b"")
    store.create("secret", b"x")
    os.mkfifo(store.root / "pipe")
    (store.root / "link").symlink_to("secret")
    (store.root / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        assert store.look(name, 10).content == b""
        assert not store.create(name, b"x")


# ---- Servers that do wrong ----


@pytest.mark.parametrize("code", [409, 429, 500, 503])
def test_a_busy_store_is_asked_again(bucket, code):
    real = bucket.put
    busy = faulty(bucket, wrong.status(code), "^PUT ", times=2)
    bucket.put = lambda *of, **how: real(*of, **how) if busy.hits == 2 else True
    assert over(bucket).create(NAME, b"first") and busy.hits == 2
    assert bucket.objects[f"{RUN}/{NAME}"] == b"first"


@pytest.mark.parametrize(
    "spoil", [wrong.status(500), wrong.refused, wrong.silent, wrong.status(409)]
)
def test_after_an_answer_that_was_lost_whose_bytes_stand_there_won(bucket, spoil):
    lost = faulty(bucket, spoil, "^PUT ", times=2)
    assert over(bucket).create("a", b"mine")  # written, and said otherwise
    bucket.put(f"{RUN}/b", b"other")
    assert not over(bucket).create("b", b"mine") and lost.hits == 2


def test_a_store_that_never_answers_is_told_from_one_that_refuses(bucket):
    faulty(bucket, wrong.silent, ".", times=None)
    for ask in (lambda s: s.create("a", b"x"), lambda s: s.look("a", 1), lambda s: s.names("r/")):
        with pytest.raises(limits.UnreachableError, match="timed out"):
            ask(over(bucket))
    bucket.faults[:] = [Misbehaviour(wrong.status(403))]
    with pytest.raises(LockstepError, match="answered 403") as caught:
        over(bucket).look("a", 1)
    assert not isinstance(caught.value, limits.UnreachableError)


def test_taken_where_nothing_is_seen_is_asked_again(bucket):
    bucket.put(f"{RUN}/a", b"other")
    late = faulty(bucket, wrong.status(404), "^GET ", times=2)
    assert not over(bucket).create("a", b"mine") and late.hits == 2
    faulty(bucket, wrong.status(404), "^GET ", times=None)
    with pytest.raises(limits.UnreachableError, match="answered 412, and nothing is there"):
        over(bucket).create("a", b"mine")


@pytest.mark.parametrize("spoil", [wrong.truncated, wrong.stalled, wrong.other_size(3)])
def test_a_body_that_is_cut_is_read_again(bucket, spoil):
    bucket.put(f"{RUN}/a", b"x" * 5000)
    cut = faulty(bucket, spoil, "^GET ")
    assert over(bucket).look("a", 20_000).content == b"x" * 5000 and cut.hits == 1


@pytest.mark.parametrize("spoil", [wrong.endless, wrong.longer, wrong.chunked])
def test_a_body_longer_than_was_asked_for_is_not_read_on(bucket, spoil):
    bucket.put(f"{RUN}/a", b"x" * 5000)
    faulty(bucket, spoil, "^GET ")
    assert over(bucket).look("a", 4999).content is None
    assert bucket.sent.get(f"{RUN}/a", 0) < 10**8


def test_a_body_that_trickles_ends_in_time(bucket, monkeypatch):
    monkeypatch.setattr("pipeline.net.limits.ListingLimit.seconds", 0.3)
    bucket.put(f"{RUN}/a", b"x" * 5000)
    faulty(bucket, wrong.trickling, "^GET ", times=None)
    with refused("a", "0.3 s"):
        over(bucket).look("a", 5000)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (b"<a>", "expected a listing of S3"),
        (b"<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>", "a listing with a DOCTYPE"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>".encode("utf-16"), "expected a listing of S3"),
        (b"<a><Contents><Key>a</Key></Contents></a>", "expected a listing of S3"),
        (b"<a><IsTruncated>true</IsTruncated></a>", "rounds/: a page of the listing"),
    ],
)
def test_a_listing_that_is_none_is_refused(bucket, page, why):
    faulty(bucket, answering(page), "^GET .*list-type", times=None)
    with pytest.raises(LockstepError, match=why) as caught:
        over(bucket).names("rounds/")
    assert "\n" not in str(caught.value) and "Signature" not in str(caught.value)


def test_an_object_without_a_date_is_refused(bucket):
    bucket.put(f"{RUN}/a", b"x")
    faulty(bucket, answering(b"x", "yesterday"), "^GET ")
    with refused("Last-Modified", "yesterday"):
        over(bucket).look("a", 1)


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/New_York"])
@pytest.mark.parametrize("date", ["Thu, 15 Jan 2026 10:30:00", "Thu, 15 Jan 2026 10:30:00 -0000"])
def test_a_time_without_a_zone_is_the_same_for_readers_of_all_zones(
    bucket, monkeypatch, zone, date
):
    bucket.put(f"{RUN}/a", b"x")
    then = datetime(2026, 1, 15, 10, 30, tzinfo=UTC).timestamp()
    faulty(bucket, answering(b"x", date), "^GET ")
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        assert over(bucket).look("a", 1).seconds == then
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("code", [302, 307])
def test_what_is_put_or_removed_follows_no_redirect(bucket, code):
    asks = {"PUT": lambda s: s.create("a", b"x"), "DELETE": lambda s: s.remove("a")}
    with S3().serving() as other:
        away = wrong.redirected(f"{other.address}/ours/a")
        for verb, ask in asks.items():
            faulty(bucket, lambda answer: replace(away(answer), status=code), f"^{verb} ")
            with pytest.raises(LockstepError, match=f"redirects {verb}"):
                ask(over(bucket))
        assert other.seen == []


def test_a_refusal_says_why_as_the_store_does(bucket):
    bucket.secret = "another"
    with pytest.raises(LockstepError, match="answered 403 .*signature does not match"):
        over(bucket).create("a", b"x")
