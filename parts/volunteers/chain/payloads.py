"""Which records and payloads are a message, which are rejected, and which are ignored.

It follows from bytes and from the store's times, so that everybody decides the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.protocol.round import Round
from lockstep.wire import exchange
from lockstep.wire import message as wire
from lockstep.wire.exchange import Sent
from parts.volunteers import layout
from parts.volunteers.bodies import MessageRecord
from parts.volunteers.keys import PublicKey
from parts.volunteers.signed import is_signed, opened
from parts.volunteers.store.verbs import StoredObject

WITHHELD = "withheld"


class Refused(NamedTuple):
    """A record that counts while its peer's payload does not."""

    reason: str
    seconds: int  # from the link before to when it was decided
    record: str  # SHA-256 of the record, hex


class MessageInTime(NamedTuple):
    """A payload that is a message in time."""

    body: MessageRecord
    seconds: int  # from the link before to the later of record and payload
    record: str  # SHA-256 of the record, hex
    sent: Sent  # with the decoded message; None in its place for bytes that are no message

    @property
    def broken(self) -> bool:
        """Whether the payload's peer signed bytes that are no message of the run."""
        return self.sent.message is None


@dataclass(frozen=True)
class Expected:
    """What a round expects of its messages' payloads."""

    run: str  # SHA-256 of run.json, hex
    round: Round
    base: str  # hash of the params before it
    began: int  # when it began, by the store's clock
    payload_bytes: int  # the one length of a payload
    form: wire.Form
    limit: float  # seconds after that in which record and payload count

    def is_in_time(self, seconds: int) -> bool:
        """Return whether a record or payload put then counts, by the store's clock."""
        return seconds - self.began <= self.limit

    def after(self, seconds: int) -> int:
        """Return how long after the link a record or payload was put, by the store's clock."""
        return max(0, seconds - self.began)


def judge(
    peer: int,
    record: StoredObject,
    payload: StoredObject | None,
    key: PublicKey | None,
    expected: Expected,
) -> MessageInTime | Refused | None:
    """Judge a peer's record, which is in time, and its payload.

    None if the peer did not sign it: the record is ignored.
    """
    where = layout.of_peer(expected.round.step, peer, "record")
    if key is None or record.content is None:
        return None
    sha256, seconds = record.sha256, expected.after(record.seconds)
    try:
        body = opened(MessageRecord, record.content, key, where, layout.RECORD_BYTES)
    except LockstepError:
        kind, content = MessageRecord.kind, record.content
        is_theirs = is_signed(kind, content, key, where, layout.RECORD_BYTES)
        return Refused("form", seconds, sha256) if is_theirs else None
    for reason, actual, wanted in (
        ("run", body.run, expected.run),
        ("round", body.round, expected.round.step),
        ("peer", body.peer, peer),
        ("span", body.span, expected.round.assignment.get(peer)),
        ("base", body.base, expected.base),
    ):
        if actual != wanted:
            return Refused(reason, seconds, sha256)
    if payload is None or not expected.is_in_time(payload.seconds):
        return Refused(WITHHELD, seconds, sha256)
    seconds = expected.after(max(record.seconds, payload.seconds))
    content = payload.content
    if content is None or len(content) != expected.payload_bytes:
        return Refused("length", seconds, sha256)
    if payload.sha256 != body.sha256:
        return Refused("hash", seconds, sha256)
    if body.bytes > len(content) or any(content[body.bytes :]):
        return Refused("filling", seconds, sha256)
    sent = Sent(content[: body.bytes], bytes.fromhex(body.commitment))
    try:
        sent = exchange.receive(sent, peer, expected.round, expected.form)
    except wire.NotFiniteValueError:
        return Refused("not finite", seconds, sha256)
    except wire.WireError:
        pass  # signed bytes that are no message
    return MessageInTime(body, seconds, sha256, sent)
