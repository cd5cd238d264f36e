"""What everybody makes of a record and its payload."""

import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.dense import adamw
from lockstep.protocol import driver
from lockstep.protocol.consensus import SharedStore
from lockstep.wire import exchange
from lockstep.wire import message as wire
from parts.volunteers import layout
from parts.volunteers.bodies import LeaveNotice, MessageRecord
from parts.volunteers.chain import links
from parts.volunteers.chain.payloads import Expected, MessageInTime, Refused, judge
from parts.volunteers.keys import PrivateKey
from parts.volunteers.signed import Body, canonical, sign
from parts.volunteers.store.verbs import StoredObject
from tests.lockstep.protocol.driver.driven_run import LONG, started

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()
_, ROUND = driver.next_round(driver.ask(started(LONG, 5, reports=SharedStore()), range(5)))
ADAMW = adamw(lambda step: 0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
FORM = wire.form_of(ADAMW, {"w": jnp.zeros((4, 3))}, "lockstep")
MESSAGE = {"w": np.arange(12, dtype=np.float32).reshape(4, 3)}
SENT = exchange.send(MESSAGE, 2, ROUND, FORM)
LENGTH = 200
PAYLOAD = bytes(SENT.payload).ljust(LENGTH, b"\0")
EXPECTED = Expected("ab" * 32, ROUND, "cd" * 32, 1_000, LENGTH, FORM, 600)
PUT = 1_005


def record(payload: bytes = PAYLOAD, key: PrivateKey = KEY, **changes: object) -> StoredObject:
    said = {
        "run": EXPECTED.run, "round": 1, "peer": 2, "span": ROUND.assignment[2],
        "base": EXPECTED.base, "commitment": SENT.commitment.hex(), "bytes": len(SENT.payload),
        "sha256": hashlib.sha256(payload).hexdigest(), "loss": 1.5, "environment": "22" * 32,
    }  # fmt: skip
    return StoredObject(sign(MessageRecord(**said | changes), key, layout.RECORD_BYTES), PUT)


def verdict_on(one: StoredObject, payload: StoredObject | None = StoredObject(PAYLOAD, PUT)):  # noqa: B008
    return judge(2, one, payload, KEY.public_key(), EXPECTED)


def test_message_that_counts_is_decoded_and_has_its_time():
    one = verdict_on(record())
    assert isinstance(one, MessageInTime)
    assert (one.seconds, one.broken, one.body.loss) == (5, False, 1.5)
    assert np.array_equal(one.sent.message["w"], MESSAGE["w"])
    assert one.record == hashlib.sha256(record().content).hexdigest()


@pytest.mark.parametrize("later", [1, 595])
def test_message_whose_payload_comes_after_its_record_counts_once_both_are_there(later):
    before = verdict_on(record(), None)
    one = verdict_on(record(), StoredObject(PAYLOAD, PUT + later))
    assert isinstance(one, MessageInTime) and one.seconds == 5 + later
    others = {peer: one for peer in ROUND.assignment}
    assert [links.is_whole(ROUND, others | {2: last}) for last in (before, one)] == [False, True]


class AnotherRecord(Body):
    """Signed as a record, and of another form."""

    kind = "record"
    peer: int = 2


def unbounded(**changes: object) -> StoredObject:
    """A signed record with values that its form does not have."""
    body = json.loads(record().content)["body"] | changes
    signature = KEY.sign(b"lockstep/record/1\0" + canonical(body)).hex()
    content = canonical({"body": body, "signature": signature})
    return StoredObject(content.ljust(layout.RECORD_BYTES, b"\n"), PUT)


NAN = exchange.send({"w": np.full((4, 3), np.nan, np.float32)}, 2, ROUND, FORM)
NAN_PAYLOAD = bytes(NAN.payload).ljust(LENGTH, b"\0")


@pytest.mark.parametrize(
    ("one", "payload", "reason"),
    [
        (record(run="ee" * 32), PAYLOAD, "run"),
        (record(round=2), PAYLOAD, "round"),
        (record(peer=3), PAYLOAD, "peer"),
        (record(span=(0, 99)), PAYLOAD, "span"),
        (record(base="ee" * 32), PAYLOAD, "base"),
        (unbounded(loss=1.7e308), PAYLOAD, "form"),  # of two the mean is infinite
        (unbounded(loss=10**300), PAYLOAD, "form"),
        (record(), None, "withheld"),
        (record(), StoredObject(PAYLOAD, 1_601), "withheld"),  # put after the round's limit
        (record(), PAYLOAD[:-1], "length"),
        (record(), PAYLOAD + b"\0", "length"),
        (record(), StoredObject(None, PUT), "length"),  # a gigabyte
        (record(), PAYLOAD[:-1] + b"\1", "hash"),
        (record(PAYLOAD[:-1] + b"\1"), PAYLOAD[:-1] + b"\1", "filling"),
        (record(bytes=LENGTH + 1), PAYLOAD, "filling"),
        (StoredObject(sign(AnotherRecord(), KEY, layout.RECORD_BYTES), PUT), PAYLOAD, "form"),
        (
            record(NAN_PAYLOAD, commitment=NAN.commitment.hex(), bytes=len(NAN.payload)),
            NAN_PAYLOAD,
            "not finite",
        ),
    ],
)
def test_message_that_does_not_count_has_a_reason(one, payload, reason):
    seen = StoredObject(payload, PUT) if isinstance(payload, bytes) else payload
    assert verdict_on(one, seen) == Refused(reason, 5, hashlib.sha256(one.content).hexdigest())


@pytest.mark.parametrize(
    "one",
    [
        record(key=OTHER),
        StoredObject(None, PUT),
        unbounded(loss=10**400),  # no JSON that is read
        StoredObject(record().content[:-1], PUT),
        StoredObject(record().content.replace(b'"loss":1.5', b'"loss":1.4'), PUT),
        StoredObject(
            sign(LeaveNotice(run="ab" * 32, round=1, peer=2), KEY, layout.RECORD_BYTES), PUT
        ),
    ],
)
def test_what_the_peer_did_not_sign_is_as_if_it_was_not_there(one):
    assert verdict_on(one) is None


def test_record_of_a_slot_that_nobody_has_is_as_if_it_was_not_there():
    assert judge(2, record(), StoredObject(PAYLOAD, PUT), None, EXPECTED) is None


@pytest.mark.parametrize(
    "payload", [b"\xff" * LENGTH, PAYLOAD[:40] + b"\1" + PAYLOAD[41:]], ids=["no message", "other"]
)
def test_signed_bytes_that_are_no_message_are_broken(payload):
    one = verdict_on(record(payload, bytes=len(payload.rstrip(b"\0"))), StoredObject(payload, PUT))
    assert isinstance(one, MessageInTime)
    assert one.broken
