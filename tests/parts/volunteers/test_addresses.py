"""A volunteer without credentials does what the lab signed, and nothing else."""

import logging
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from lockstep.errors import LockstepError
from parts.volunteers import keys, layout, signed
from parts.volunteers.lab.signing import sign_ahead
from parts.volunteers.store import addresses, chunks, sealed
from parts.volunteers.store.addresses import SignedAddresses, open_addressed
from parts.volunteers.store.patient_store import PatientStore, Waits
from parts.volunteers.store.schemes import open_store
from parts.volunteers.store.verbs import AwaitedError, MissedError
from parts.volunteers.store.web_store import StoreRequest
from pipeline.net import fsspec_files
from tests import tiny
from tests.parts.volunteers.stores import BUCKET, RUN, SOON, reader
from tests.servers import s3 as s3_server

LAB, KEY, OTHER = (keys.PrivateKey.generate() for _ in range(3))
READER = reader(KEY)
HOUR = 3600
STEP = 70  # of the rounds that are signed, 64 to 79
STEPS = range(64, 80)
PAYLOAD, RECORD = (layout.of_peer(STEP, 7, what) for what in ("payload", "record"))


@pytest.fixture
def lab(bucket):
    return open_store(f"s3://{BUCKET}/{RUN}", SOON)


@pytest.fixture
def volunteer(bucket, lab, monkeypatch):
    """Its store, after the lab signed an hour for it, and the lab's credentials have gone."""
    sign_ahead(lab, [READER], STEPS, HOUR, LAB)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    return without_credentials(bucket)


def without_credentials(bucket, reader=READER, key=KEY):
    address = f"{bucket.address}/{BUCKET}/a%20run"
    return open_addressed(address, reader, key, LAB.public_key(), SOON)


@contextmanager
def an_hour_later(*modules):
    """Has an hour pass for the store, for the volunteer, or for both."""
    later = SimpleNamespace(time=lambda: time.time() + HOUR + 1)
    with pytest.MonkeyPatch.context() as patch:
        for module in modules or (s3_server, addresses):
            patch.setattr(module, "time", later)
        yield


# ---- What an address does ----


def test_a_volunteer_puts_its_own_slots_and_lists_its_rounds(volunteer):
    assert volunteer.names(layout.round_folder(STEP)) == {}
    assert volunteer.create(PAYLOAD, b"p" * 5000)
    for step, what in (*((STEP, w) for w in ("record", "join", "leave", "closed")), (79, "asked")):
        content = b"x" * layout.signed_bytes(what, 16)
        assert volunteer.create(layout.of_peer(step, 7, what), content)
    assert not volunteer.create(PAYLOAD, b"q" * 5000) and volunteer.create(PAYLOAD, b"p" * 5000)
    assert len(volunteer.names(layout.round_folder(STEP))) == 5
    assert volunteer.look(PAYLOAD, 5000).content == b"p" * 5000
    assert volunteer.names(layout.ADMISSIONS) == {}


@pytest.mark.parametrize(
    ("name", "length"),
    [
        (layout.of_peer(STEP, 8, "record"), layout.RECORD_BYTES),  # another's slot
        (layout.of_peer(STEP + 10, 7, "record"), layout.RECORD_BYTES),  # a later round
        (RECORD, layout.RECORD_BYTES + 1),
        (PAYLOAD, 4999),
        (layout.of_peer(STEP, 8, "closed"), layout.signed_bytes("closed", 16)),
        (layout.admission(7, 0), 100),
        ("run.json", 100),
    ],
)
def test_it_has_no_address_for_anything_else(volunteer, bucket, name, length):
    before = len(bucket.seen)
    with pytest.raises(LockstepError, match="found no address for .* expected one that the lab"):
        volunteer.create(name, b"x" * length)
    assert all("/addresses/007/" in path for _, path, _ in bucket.seen[before:])
    for verb in (lambda: volunteer.names("rounds/"), lambda: volunteer.remove(RECORD)):
        with pytest.raises(LockstepError, match="found no address for"):
            verb()


def test_the_store_refuses_another_use_of_an_address(volunteer, bucket):
    endpoint = volunteer.endpoint
    url = endpoint.find(right := StoreRequest("PUT", RECORD, layout.RECORD_BYTES))
    endpoint.give(endpoint.folder, {StoreRequest("PUT", RECORD, 3): url})
    with pytest.raises(LockstepError, match="answered 403 .*signature") as caught:
        volunteer.create(RECORD, b"abc")
    assert "X-Amz-Signature=" not in str(caught.value) and bucket.key not in str(caught.value)
    endpoint.give(endpoint.folder, {right: url.replace("007.record", "008.record")})
    with pytest.raises(LockstepError, match="answered 403"):
        volunteer.create(RECORD, b"x" * layout.RECORD_BYTES)


def test_an_address_ends(volunteer):
    with an_hour_later(s3_server), pytest.raises(LockstepError, match="Request has expired"):
        volunteer.create(RECORD, b"x" * layout.RECORD_BYTES)


def test_what_is_not_there_is_none_though_the_store_hides_it(volunteer, bucket):
    assert volunteer.look(RECORD, 10) is None
    assert bucket.seen[-1][2] is None  # asked without credentials


def test_a_round_of_256_peers_is_listed_in_two_pages(bucket, lab):
    of_many = reader(KEY, slots=256)
    sign_ahead(lab, [of_many], STEPS, HOUR, LAB)
    for peer in range(256):
        for what in layout.KINDS:
            bucket.put(f"{RUN}/{layout.of_peer(64, peer, what)}", b"x")
    store = without_credentials(bucket, of_many)
    store.names(layout.ADMISSIONS)
    before = len(bucket.seen)
    assert len(store.names(layout.round_folder(64))) == len(layout.KINDS) * 256
    assert len(bucket.seen) - before == 2
    bucket.objects |= {f"{RUN}/rounds/00000064/000.{n:04}": b"x" for n in range(1001)}
    with pytest.raises(LockstepError, match="a page that links to itself"):
        store.names(layout.round_folder(64))


# ---- The file ----


def one_file(lab):
    (name,) = sign_ahead(lab, [READER], STEPS, HOUR, LAB)
    return name, lab.look(name, 2**21).content


def body_of(name, content):
    inner = sealed.unseal(
        addresses.sealed_in(content, LAB.public_key(), READER.run, name), KEY, name
    )
    return signed.opened(SignedAddresses, zlib.decompress(inner), LAB.public_key(), "it")


def file_of(inner, name, author=LAB, run=READER.run):
    return addresses.sign_file(sealed.seal(inner, KEY.public_key(), name), author, run, name)


def passed_over(bucket, caplog, name, content, key=KEY):
    """What a volunteer says of a file from which it takes nothing."""
    bucket.put(f"{RUN}/{name}", content)
    caplog.clear()
    with pytest.raises(LockstepError, match="found no address for LIST"):
        without_credentials(bucket, key=key).names(layout.ADMISSIONS)
    (said,) = (record.getMessage() for record in caplog.records)
    return said


def test_only_its_reader_opens_a_file_under_its_name(lab, bucket, caplog):
    name, content = one_file(lab)
    assert name == "addresses/007/00000.sealed" and b"Signature" not in content
    assert f"{name}: cannot be opened" in passed_over(bucket, caplog, name, content, key=OTHER)
    other = name.replace("007", "008")
    assert addresses.sealed_in(content, LAB.public_key(), READER.run, other) is None
    with pytest.raises(LockstepError, match="cannot be opened"):
        sealed.unseal(addresses.sealed_in(content, LAB.public_key(), READER.run, name), KEY, other)


def again(author=LAB, **changes):
    """The compressed body of a file, changed, and signed anew by the lab or by another."""
    return lambda body: zlib.compress(signed.sign(body.model_copy(update=changes), author))


@pytest.mark.parametrize(
    ("inner", "named"),
    [
        (again(OTHER), "the signature"),
        (again(run="cd" * 32), "expected run abababababab and peer 7"),
        (again(peer=8), "expected run abababababab and peer 7"),
        (again(puts={RECORD: "http://127.0.0.1:1/ours/a%20run/record?X-Amz-Signature=a"}), ""),
        (again(puts={RECORD: "http://[::"}), ""),
        (again(lists=(("peers/", "", "https://elsewhere.example/ours?X-Amz-Signature=a"),)), ""),
        (again(until=10**12), ""),
        (again(until=2**33), ""),
        (lambda _: b"", ""),
        (lambda _: b"no zlib", ""),
        (lambda _: zlib.compress(bytes(2**25)), ""),
        (lambda _: zlib.compress(b"{}"), ""),
    ],
)
def test_what_the_lab_may_not_say_to_this_volunteer_is_passed_over(
    lab, bucket, caplog, inner, named
):
    """It can send nobody to another server or to another age; and no bytes stop a reader."""
    name, content = one_file(lab)
    said = passed_over(bucket, caplog, name, file_of(inner(body_of(name, content)), name))
    assert name in said and named in said and "Signature" not in said and "\n" not in said


def test_files_that_somebody_else_put_stop_neither_the_lab_nor_the_volunteer(lab, bucket):
    for number in (0, 2):
        bucket.put(f"{RUN}/{layout.addresses(7, number)}", b"junk")
    bucket.put(f"{RUN}/addresses/007/notes.txt", b"junk")
    names = sign_ahead(lab, [READER], range(STEPS.start, STEPS.stop + addresses.SPAN), HOUR, LAB)
    assert names == [layout.addresses(7, 0), layout.addresses(7, 1)]
    others = file_of(b"", layout.addresses(7, 3), OTHER)
    bucket.put(f"{RUN}/{layout.addresses(7, 3)}", others)
    store = without_credentials(bucket)
    for step in (STEPS.stop, STEPS.start):
        assert store.create(layout.of_peer(step, 7, "leave"), b"x" * layout.LEAVE_BYTES)


def test_whoever_takes_all_names_of_files_keeps_the_lab_from_nothing(lab, bucket, monkeypatch):
    monkeypatch.setattr(addresses, "MOST_FILES", 40)
    sign_ahead(lab, [READER], STEPS, HOUR, LAB)
    kept = bucket.objects[f"{RUN}/{layout.addresses(7, 0)}"]
    for number in range(1, 40):
        name = layout.addresses(7, number)
        of_another_run = file_of(b"", name, run="cd" * 32)
        bucket.put(f"{RUN}/{name}", [kept, b"junk", of_another_run][number % 3])
    later = range(STEPS.stop, STEPS.stop + addresses.SPAN)
    assert sign_ahead(lab, [READER], later, HOUR, LAB) == [layout.addresses(7, 1)]
    assert bucket.objects[f"{RUN}/{layout.addresses(7, 0)}"] == kept
    store, before = without_credentials(bucket), len(bucket.seen)
    for step in (STEPS.stop, STEPS.start):
        assert store.create(layout.of_peer(step, 7, "leave"), b"x" * layout.LEAVE_BYTES)
    assert len(bucket.seen) - before < 40  # it does not read what others put, one by one


@pytest.mark.parametrize("data", [b"", b"LSSEALED", b"LSSEALED" + bytes(99), b"x" * 99])
def test_no_bytes_are_taken_for_sealed(data):
    with pytest.raises(LockstepError, match="cannot be opened"):
        sealed.unseal(data, KEY, "a")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_the_newest_file_is_found_and_older_ones_are_read_where_they_are_needed(lab, bucket, count):
    names = sign_ahead(lab, [READER], range(0, 16 * count), HOUR, LAB)
    assert names == [f"addresses/007/0000{number}.sealed" for number in range(count)]
    store = without_credentials(bucket)
    last, first = (layout.of_peer(step, 7, "leave") for step in (16 * count - 1, 0))
    for name in (last, first):
        assert store.create(name, b"x" * layout.LEAVE_BYTES)
    reads = [path for _, path, _ in bucket.seen if ".sealed" in path and "X-Amz" not in path]
    assert len(reads) <= count + 2 * count.bit_length() + 3
    before = len(bucket.seen)
    store.names(layout.round_folder(16 * count - 1))
    assert len(bucket.seen) == before + 1


def test_newer_addresses_take_the_place_of_those_that_ended(lab, bucket):
    sign_ahead(lab, [READER], STEPS, HOUR, LAB)
    store, endpoint = (one := without_credentials(bucket)), one.endpoint
    store.names(layout.round_folder(STEP))
    assert abs(endpoint.until - time.time() - HOUR) < 60
    assert sign_ahead(lab, [READER], STEPS, 3 * HOUR, LAB) == ["addresses/007/00001.sealed"]
    assert "X-Amz-Expires=3600" in endpoint.find(StoreRequest("PUT", PAYLOAD, 5000))  # still holds
    with an_hour_later():
        assert store.create(PAYLOAD, b"p" * 5000)
    assert endpoint.until > time.time() + 2 * HOUR


def test_addresses_that_ended_are_waited_for_and_not_tried_again(lab, bucket, monkeypatch):
    monkeypatch.setattr(addresses, "AGAIN", 0)
    sign_ahead(lab, [READER], STEPS, HOUR, LAB)
    store, content = without_credentials(bucket), b"x" * layout.RECORD_BYTES
    store.names(layout.ADMISSIONS)
    before = len(bucket.seen)
    with an_hour_later():
        for _ in range(3):
            with pytest.raises(AwaitedError):
                store.create(RECORD, content)
    assert [verb for verb, _, _ in bucket.seen[before:]].count("PUT") == 1
    sign_ahead(lab, [READER], STEPS, 3 * HOUR, LAB)
    with an_hour_later():
        assert store.create(RECORD, content)


def test_a_round_that_is_not_signed_yet_is_waited_for_and_one_before_is_missed(volunteer):
    for step, error in ((STEPS.stop, AwaitedError), (STEPS.start - 1, MissedError)):
        with pytest.raises(error, match="found no address"):
            volunteer.create(layout.of_peer(step, 7, "leave"), b"x" * layout.LEAVE_BYTES)


def test_a_process_goes_on_once_more_is_signed(lab, bucket, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    sign_ahead(lab, [READER], STEPS, HOUR, LAB)
    here = PatientStore(without_credentials(bucket))
    steps = iter([range(80, 90), range(90, 100)])
    sign = partial(sign_ahead, lab, [READER], seconds=HOUR, lab=LAB)
    monkeypatch.setattr(Waits, "sleep", lambda _, at_once: sign(steps=next(steps)))
    content = b"x" * layout.LEAVE_BYTES
    assert here.put(layout.of_peer(80, 7, "leave"), content)
    assert here.look(layout.of_peer(80, 7, "leave"), layout.LEAVE_BYTES).content == content
    assert not here.put(layout.of_peer(50, 7, "leave"), content)  # the run has gone on
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "rounds up to 79" in text or "rounds up to 89" in text]
    assert sum("waits until the lab" in text for text in said) == 1
    warned = sum("no addresses after" in text for text in said)  # less than two hours are left
    assert warned in (1, 2)  # both may end in the same second


WAITS = """
from parts.volunteers.store.patient_store import PatientStore
from parts.volunteers.store.verbs import AwaitedError
from pipeline.stage import signals

class Never:
    address = "file:///never"

    def create(self, name, content):
        print("asked", flush=True)
        raise AwaitedError("no address")

with signals.stopping():
    PatientStore(Never()).put("rounds/00000001/000.leave", b"")
"""


def test_a_process_that_waits_for_addresses_is_ended_by_a_request():
    command, env = [sys.executable, "-c", WAITS], tiny.environment(tiny.PROJECT)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tiny.PROJECT, env=env, stdout=pipe, text=True) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["asked\n"] * 2
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM


def test_who_has_no_addresses_yet_gets_them_once_they_are_signed(lab, bucket):
    store = without_credentials(bucket)
    with pytest.raises(LockstepError, match="found no address for LIST, expected one that the lab"):
        store.names(layout.ADMISSIONS)
    sign_ahead(lab, [READER], STEPS, HOUR, LAB)
    assert store.names(layout.ADMISSIONS) == {}


def test_only_a_store_that_signs_is_signed_for(lab, tmp_path):
    with pytest.raises(LockstepError, match="^file://.* expected s3://"):
        sign_ahead(open_store(f"file://{tmp_path}"), [READER], range(1), HOUR, LAB)
    with pytest.raises(LockstepError, match="604801 s: expected 1 to 604800"):
        sign_ahead(lab, [READER], range(1), 604_801, LAB)


def test_a_file_is_small_enough_with_the_longest_credentials(lab, bucket, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t/" * 500)
    fsspec_files.file_system.cache_clear()
    store = open_store(f"s3://{BUCKET}/{RUN}", SOON)
    (name,) = sign_ahead(store, [reader(KEY, slots=256)], range(16), HOUR, LAB)
    assert len(store.look(name, 2**21).content) < 200_000


def test_it_puts_what_it_owns_and_the_state_after_some_rounds_in_their_chunks_and_nothing_else(
    lab, bucket, tmp_path, monkeypatch
):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)
    with_states = reader(KEY, own_bytes=1200, state_bytes=1300)
    sign_ahead(lab, [with_states], STEPS, HOUR, LAB)
    store, path = without_credentials(bucket, with_states), tmp_path / "state"
    for of, size in ((layout.own_folder, 1200), (layout.state_folder, 1300)):
        path.write_bytes(bytes(size))
        chunks.put(store, folder := of(69, 7), path)
        chunks.fetch(store, folder, chunks.name_of(chunks.index_of(path)), tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()
        for other in (of(70, 7), of(69, 8)):
            with pytest.raises(LockstepError, match="found no address"):
                chunks.put(store, other, path)
        path.write_bytes(b"x")  # of another length
        with pytest.raises(LockstepError, match="found no address"):
            chunks.put(store, folder, path)
