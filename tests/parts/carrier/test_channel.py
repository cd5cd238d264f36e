"""How a message is cut into parts and joined, and what is no message."""

import json
import socket

import numpy as np
import pytest
import zmq

from lockstep.errors import LockstepError
from parts.carrier import channel
from parts.carrier.channel import PeerSecret, Secrets
from parts.carrier.requests import FrameError
from tests.errors import refused

MOST = 2**24
LARGE = np.arange(2 * channel.PART_BYTES + 9, dtype=np.uint8).data
MESSAGES = {
    "none": [],
    "empty": [b"", b"a", b""],
    "large": [b"header", LARGE, b"", LARGE[: channel.PART_BYTES]],
    "many": [bytes([n % 251]) for n in range(40_000)],
}


def cut(buffers: list) -> list[zmq.Frame]:
    return [zmq.Frame(bytes(part)) for part in channel._parts(buffers)]


@pytest.mark.parametrize("name", MESSAGES)
def test_parts_are_bounded_and_give_the_buffers_again(name):
    parts = cut(MESSAGES[name])
    assert all(len(part) <= channel.PART_BYTES for part in parts)
    assert [bytes(x) for x in channel._joined(parts, MOST)] == [bytes(x) for x in MESSAGES[name]]


@pytest.mark.parametrize(
    ("mangle", "flaw"),
    [
        (lambda parts: parts[:-1], "a part of 0 bytes, expected 262144"),
        (lambda parts: [*parts, parts[-1]], "1 parts more, expected those of 4 buffers"),
        (lambda parts: [parts[0], *parts[2:]], "a part of 6 bytes, expected 32"),
        (lambda parts: [zmq.Frame(b"\xff" * 8)], "ffffffffffffffff, expected at most 131072"),
        (lambda parts: [zmq.Frame(b"")], ", expected at most 131072 buffers"),
        (lambda parts: [zmq.Frame(bytes([1, *bytes(7)])), zmq.Frame(b"\xff" * 8)], "a message of"),
    ],
)
def test_parts_of_no_message_are_refused_before_they_take_memory(mangle, flaw):
    with pytest.raises(FrameError, match=flaw):
        channel._joined(mangle(cut(MESSAGES["large"])), MOST)


def test_an_address_that_cannot_be_listened_on_is_refused_in_one_line(tmp_path):
    secrets = Secrets(tmp_path, 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with refused(address):
            channel.Hub(address, secrets, MOST)
    with refused("HOST:PORT", 65535):
        channel.Hub("tcp://127.0.0.1:99999", secrets, MOST)  # ZeroMQ would take another one


# ---- Who has a file of keys speaks for one peer, and nobody else reads it ----


def test_each_peer_has_a_file_of_its_own_with_no_other_ones_key(tmp_path):
    secrets = Secrets(tmp_path, 3, ranks=2)
    assert sorted(secrets.places.values()) == [(p, r) for p in range(3) for r in range(2)]
    files = [*tmp_path.iterdir()]
    assert len(files) == 4 and all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    keys = [key for peer in range(3) for key in PeerSecret.read(secrets.path(peer)).private]
    assert len({*keys, secrets.private}) == 7


def test_a_trainer_started_again_accepts_the_keys_it_gave(tmp_path):
    before = Secrets(tmp_path, 2)
    again = Secrets(tmp_path, 2)
    assert (again.private, again.places) == (before.private, before.places)


def test_a_file_of_keys_that_others_may_read_is_refused(tmp_path):
    path = Secrets(tmp_path, 1).path(0)
    path.chmod(0o640)
    with refused("peer-0.json", 600):
        PeerSecret.read(path)


@pytest.mark.parametrize(
    ("damage", "flaw"),
    [
        (lambda text, secret: text.replace("{", "", 1), "no JSON"),
        (lambda text, secret: text.replace('"server":"', '"server":"ü', 1), "server"),
        # the key itself may begin with a bracket
        (
            lambda text, secret: text.replace(json.dumps(secret), json.dumps(f"{secret}1")),
            "private.0",
        ),
    ],
)
def test_a_damaged_key_is_refused_in_one_line(tmp_path, damage, flaw):
    path = Secrets(tmp_path, 1).path(0)
    text = path.read_text()
    path.write_text(damage(text, json.loads(text)["private"][0]))
    with pytest.raises(LockstepError) as caught:
        PeerSecret.read(path)
    assert str(caught.value) == f"{path}: {flaw}, expected the file of a run's secret"
