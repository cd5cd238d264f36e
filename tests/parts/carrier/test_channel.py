"""How a message is cut into parts and joined, and what is no message."""

import socket

import numpy as np
import pytest
import zmq

from parts.carrier import channel
from parts.carrier.channel import Secrets
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
