"""What is signed has one encoding, one kind and one author; and what a name stands for."""

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import LockstepError
from parts.volunteers import keys, layout, signed
from parts.volunteers.bodies import JoinRequest, LeaveNotice, MessageRecord
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.errors import check_names

KEY, OTHER = keys.PrivateKey.generate(), keys.PrivateKey.generate()
HASH = "ab" * 32
LEAVE = LeaveNotice(run=HASH, round=7, peer=3)
RECORD = MessageRecord(
    run=HASH, round=7, peer=3, span=(4, 7), base=HASH, commitment=HASH, bytes=9, sha256=HASH,
    loss=2.5, environment=HASH,
)  # fmt: skip


def opened(data, model=LeaveNotice, key=KEY, length=None):
    return signed.opened(model, data, key.public_key(), "it", length)


# ---- One author, one kind ----


def test_another_key_and_another_kind_are_refused():
    data = signed.sign(LEAVE, KEY)
    with pytest.raises(LockstepError, match="the signature .* ed25519:"):
        opened(data, key=OTHER)

    class Renamed(LeaveNotice):
        kind = "stay"

    with pytest.raises(LockstepError, match="the signature .* ed25519:"):
        opened(data, Renamed)


@given(st.data())
def test_no_changed_byte_passes(data):
    whole = signed.sign(RECORD, KEY)
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LockstepError):
        opened(bytes(changed), MessageRecord)


@given(st.binary(max_size=200))
def test_no_bytes_stop_a_reader(data):
    with pytest.raises(LockstepError) as caught:
        opened(data)
    assert "\n" not in str(caught.value)


# ---- One encoding ----


def other_encodings():
    data = signed.sign(RECORD, KEY)
    document = json.loads(data)
    yield "spaces", json.dumps(document).encode()
    yield "a newline", data + b"\n"
    yield "order", json.dumps(dict(reversed(document.items())), separators=(",", ":")).encode()
    yield "a key twice", data.replace(b'{"body":', b'{"body":1,"body":', 1)
    yield "an escape", data.replace(b'"loss"', b'"l\\u006fss"')
    yield "a number", data.replace(b"2.5", b"2.50")
    yield (
        "upper case",
        data.replace(document["signature"].encode(), document["signature"].upper().encode()),
    )
    yield "NaN", data.replace(b"2.5", b"NaN")
    yield "another key", data[:-1] + b',"z":1}'
    yield "no table", b"[]"
    yield "depth", b"[" * 10_000


@pytest.mark.parametrize("what", [what for what, _ in other_encodings()])
def test_a_body_has_one_encoding(what):
    with pytest.raises(LockstepError, match="expected a body and its signature in canonical JSON"):
        opened(dict(other_encodings())[what], MessageRecord)


def test_a_body_has_one_length_in_a_slot():
    data = signed.sign(LEAVE, KEY, 1024)
    for other in (data[:-1], data + b"\n", data[:-1] + b" ", data.rstrip(), None, b""):
        with pytest.raises(LockstepError):
            opened(other, length=1024)
    with pytest.raises(LockstepError, match="leave: .* bytes, expected at most 99"):
        signed.sign(LEAVE, KEY, 99)
    with pytest.raises(LockstepError, match="over 1048576 bytes"):
        opened(b" " * (2**20 + 1))


# ---- What a body holds ----


@pytest.mark.parametrize(
    ("key", "value"),
    [("peer", 256), ("peer", -1), ("peer", "3"), ("round", 1.0), ("run", "x"), ("more", 1)],
)
def test_a_body_of_another_form_is_refused_by_its_key(key, value):
    body = LEAVE.model_dump(mode="json") | {key: value}
    signature = KEY.sign(b"lockstep/leave/1\0" + signed.canonical(body)).hex()
    with pytest.raises(LockstepError, match=rf"it: .*{key}"):
        opened(signed.canonical({"body": body, "signature": signature}))


@pytest.mark.parametrize(
    ("body", "length"),
    [
        (RECORD.model_copy(update={"loss": -3.4028234663852886e+38, "own": HASH, "bytes": 2**28,
                                   "span": (2**62, 2**62), "round": 10**8 - 1, "peer": 255}),
         layout.RECORD_BYTES),
        (JoinRequest(run=HASH, round=10**8 - 1, peer=255, self_test=HASH,
              environment={f"key {n}": "v" * 40 for n in range(50)}), layout.JOIN_BYTES),
        (LEAVE, layout.LEAVE_BYTES),
    ],
)  # fmt: skip
def test_what_is_signed_is_read_back_and_fits_the_length_of_its_slot(body, length):
    assert opened(signed.sign(body, KEY), type(body)) == body
    data = signed.sign(body, KEY, length)
    assert opened(data, type(body), length=length) == body
    assert len(data) == length and json.loads(data)


# ---- Keys ----


def test_a_key_file_is_new_and_its_owners_alone(tmp_path):
    path = tmp_path / "new" / "my.key"
    key = keys.create(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert keys.public_text(keys.read(path)) == keys.public_text(key)
    with pytest.raises(LockstepError, match="my.key: File exists"):
        keys.create(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_key_file_that_others_may_open_is_refused(tmp_path, mode):
    keys.create(path := tmp_path / "my.key")
    path.chmod(mode)
    with pytest.raises(LockstepError, match=f"mode {mode:o}, expected 600"):
        keys.read(path)


@pytest.mark.parametrize("content", [b"", b"x", b"-----BEGIN PRIVATE KEY-----\n"])
def test_another_file_is_no_key(tmp_path, content):
    path = tmp_path / "my.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(LockstepError, match="expected a private key of Ed25519"):
        keys.read(path)


def test_a_public_key_is_read_back_as_it_is_printed():
    text = keys.public_text(KEY)
    assert keys.public_text(keys.parse_public(text, "KEY")) == text
    for other in ("", text.upper(), text + "0", text[8:], f" {text}", text + "\n"):
        with pytest.raises(LockstepError, match="KEY: found .* expected ed25519:"):
            keys.parse_public(other, "KEY")


def test_a_key_is_made_in_the_folder_of_its_user_unless_a_file_is_named(tmp_path):
    asked, own = ("-m", "pipeline", "volunteer", "key"), str(tmp_path / "c")
    first, again = (tiny.python(*asked, cwd=tmp_path, XDG_CONFIG_HOME=own).stdout for _ in "12")
    assert first.startswith("ed25519:") and first == again
    (key,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert key == tmp_path / "c" / "lockstep" / "volunteer.pem"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_a_user_without_a_folder_as_a_containers_gets_no_key_in_the_current_one(tmp_path):
    program = "import os, pwd, sys; pwd.getpwuid = {}.__getitem__; os.environ.pop('HOME')\n"
    program += "from pipeline import __main__ as it; sys.argv[1:] = 'volunteer', 'key'; it.main()"
    check_names(tiny.python("-c", program, cwd=tmp_path, XDG_CONFIG_HOME="").stderr, "--key", "~")
    assert not [*tmp_path.iterdir()]


def test_git_takes_no_private_key_of_a_checkout():
    names = ["volunteer.pem", "mine.pem", "params/lab.pem", "data/x.pem", "mine.key"]
    assert tiny.git(PROJECT, "check-ignore", *names).split() == names


# ---- Names ----


def test_a_name_of_a_round_stands_for_one_slot():
    made = {layout.of_peer(123, 7, what): layout.RoundObject(123, what, 7) for what in layout.KINDS}
    assert {name: layout.parse(name) for name in made} == made
    assert "rounds/00000123/007.record" in made
    names = [*made, "rounds/00000123/008.record", "rounds/00000123/x", "run.json"]
    records = {peer: layout.of_peer(123, peer, "record") for peer in (7, 8)}
    assert layout.names_by_peer(names, "record") == records


@pytest.mark.parametrize(
    "name",
    ["rounds/123/007.record", "rounds/00000123/7.record", "rounds/00000123/closed.0",
     "rounds/00000123/007.record\n", "rounds/00000123/007.open", "rounds/00000123/record.0",
     "rounds/٠٠٠٠٠١٢٣/007.record"],
)  # fmt: skip
def test_every_other_name_is_ignored(name):
    assert layout.parse(name) is None
