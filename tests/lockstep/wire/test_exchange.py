"""The golden commitment to a message."""

import hashlib

from lockstep.wire.exchange import data_hash


def test_data_hash_is_psyches():
    golden = "116cd5c0789a2a9f93977404e64d954b77c1059cdcf935c075b2dcf45c7d8032"
    assert data_hash(7, 16, 31, []).hex() == golden


def test_data_hash_covers_the_fields_in_order():
    header = (7).to_bytes(4, "big") + (16).to_bytes(8, "big") + (31).to_bytes(8, "big")
    expected = hashlib.sha256(header + b"index" + b"value").digest()
    assert data_hash(7, 16, 31, [b"index", b"value"]) == expected
    assert data_hash(7, 16, 31, [b"value", b"index"]) != expected
