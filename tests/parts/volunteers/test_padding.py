"""A payload has one length, and nothing beside its message."""

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.wire import message as wire
from parts.volunteers import padding

LIKE = {"w": np.arange(4, dtype=np.float32)}
FORM = wire.Form(LIKE, {"w": 0}, "lockstep", 4)


def test_a_message_is_read_back_from_its_payload():
    data = wire.encode(LIKE, FORM)
    payload = padding.padded(data, 100)
    assert len(payload) == 100
    found = wire.decode(padding.unpadded(payload, len(data), "it"), FORM)
    np.testing.assert_array_equal(found["w"], LIKE["w"])


@pytest.mark.parametrize(("size", "why"), [(101, "100 bytes, expected 101"), (31, "zeros after")])
def test_what_follows_a_message_are_zeros(size, why):
    payload = padding.padded(wire.encode(LIKE, FORM), 100)
    payload = payload[:-1] + (b"x" if size == 31 else b"\0")
    with pytest.raises(LockstepError, match=why):
        padding.unpadded(payload, size, "it")


def test_a_run_whose_messages_are_too_long_is_refused():
    assert padding.payload_bytes(FORM, 32) == 32 == len(wire.encode(LIKE, FORM))
    with pytest.raises(
        LockstepError, match=r"\[volunteers\] most_bytes is 31, expected at least 32"
    ):
        padding.payload_bytes(FORM, 31)
