"""The golden commitment to a message."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.wire import exchange
from lockstep.wire.exchange import data_hash
from lockstep.wire.message import Form


def test_data_hash_is_psyches():
    golden = "116cd5c0789a2a9f93977404e64d954b77c1059cdcf935c075b2dcf45c7d8032"
    assert data_hash(7, 16, 31, []).hex() == golden


def test_data_hash_covers_the_fields_in_order():
    header = (7).to_bytes(4, "big") + (16).to_bytes(8, "big") + (31).to_bytes(8, "big")
    expected = hashlib.sha256(header + b"index" + b"value").digest()
    assert data_hash(7, 16, 31, [b"index", b"value"]) == expected
    assert data_hash(7, 16, 31, [b"value", b"index"]) != expected


def test_a_peer_commits_to_the_fields_of_a_message_that_is_not_kept(tmp_path):
    message = {"a": np.arange(600, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    form = Form(message, {"a": 0, "b": 0}, "lockstep", 606)
    round_ = SimpleNamespace(step=7, assignment={4: (16, 31)})
    expected = data_hash(7, 16, 31, [message["a"].tobytes(), message["b"].tobytes()])
    sent = exchange.send(message, 4, round_, form)
    spooled = exchange.send_spooled([*message.values()], 4, round_, form, tmp_path)
    assert not form.kept
    assert sent.commitment == spooled.commitment == expected
    exchange.receive(sent, 4, round_, form)
    other = sent._replace(commitment=data_hash(7, 16, 31, [b"another"]))
    with pytest.raises(exchange.CommitmentError):
        exchange.receive(other, 4, round_, form)
