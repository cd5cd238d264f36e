"""Sending and receiving: a message's bytes with the commitment to it, the hash of its fields."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.protocol.round import Round
from lockstep.wire import bound, spool
from lockstep.wire import message as wire
from lockstep.wire.spool import Buffer


class Asked(IntEnum):
    """What somebody reads of a run's exchanged messages, and what therefore is made.

    Nothing else is: a message that nobody reads stays where it was made.
    """

    FACTS = 0  # whether they are finite, their largest value, their size on the wire
    COMMITMENT = 1
    BYTES = 2


class Sent(NamedTuple):
    """What a peer sends in an exchange: its message, and what somebody asks of it."""

    payload: Buffer | None  # its bytes; None if nobody reads them
    commitment: bytes  # to the message; empty if nobody reads it
    message: Tree = None  # where it was made, or as the payload was decoded; None before that
    largest: float = 0.0  # of that message, see `bound`
    counted: int = 0  # its bytes on the wire, of a message without payload

    @property
    def size(self) -> int:
        """A sent message's bytes on the wire."""
        return self.counted if self.payload is None else len(self.payload)


class CommitmentError(wire.WireError):
    """A message arrived, but not the one that was committed to."""


def send(message: Tree, peer: int, round_: Round, form: wire.Form) -> Sent:
    """Return a peer's message as bytes, with the commitment to it."""
    return Sent(wire.encode(message, form), commit(message, peer, round_))


def send_spooled(
    leaves: list[np.ndarray], peer: int, round_: Round, form: wire.Form, folder: Path | None
) -> Sent:
    """Return a dense message as bytes on disk, and free its arrays one by one.

    The bytes are those of `send`. Only one array at a time exists both in memory and as bytes, so
    that a message of gigabytes does not double: the list `leaves` is empty afterwards.
    """
    committed: list[bytes] = []

    def write(take: Callable[[Buffer], Any]) -> None:
        take(form.header)

        def fields() -> Iterator[Buffer]:
            while leaves:
                for field in wire.fields(leaves.pop(0)):
                    take(field)
                    yield field

        committed.append(data_hash(round_.step, *round_.assignment[peer], fields()))

    return Sent(spool.hold(folder, write), committed[0])


def data_hash(step: int, first: int, last: int, fields: Iterable[Buffer]) -> bytes:
    """Return the commitment to what is sent: SHA-256 over Psyche's field order.

    SHA-256(step u32 + first u64 + last u64, all big-endian, + every field's bytes).

    The peer trained on the sequences first to last, inclusive. `fields` are, for each parameter in
    the order of the wire, its index bytes, then its value bytes. Psyche hashes no lengths, so bytes
    could move between neighbouring fields without changing the hash. The wire format rules that
    out: the shapes of the params fix each field's length.
    """
    digest = hashlib.sha256(step.to_bytes(4, "big"))
    digest.update(first.to_bytes(8, "big") + last.to_bytes(8, "big"))
    for field in fields:
        digest.update(field)
    return digest.digest()


def commit(message: Tree, peer: int, round_: Round) -> bytes:
    """Return the commitment of a sender to its message in a round."""
    # The fields, not the encoded bytes: both layouts of the wire have the same commitment.
    return data_hash(round_.step, *round_.assignment[peer], wire.fields(message))


def receive(sent: Sent, peer: int, round_: Round, form: wire.Form) -> Sent:
    """Return what a peer sent, decoded and checked as every receiver does.

    Raises:
      WireError: The bytes are not a message of this run.
      CommitmentError: They are not the message that was committed to.
    """
    received = decoded(sent, form)
    check(received.message, sent.commitment, peer, round_)
    return received


def check(message: Tree, commitment: bytes, peer: int, round_: Round) -> None:
    """Check a received message against the commitment to it."""
    hash_ = commit(message, peer, round_)
    if hash_ != commitment:
        raise CommitmentError(
            f"payload hashes to {hash_.hex()[:12]}, expected its commitment {commitment.hex()[:12]}"
        )


def decoded(sent: Sent, form: wire.Form) -> Sent:
    """Return what was received, decoded but not checked against its commitment.

    Raises:
      WireError: The bytes are not a message of this run.
    """
    assert sent.payload is not None  # nobody asks for what was not made
    message = wire.decode(sent.payload, form)
    return sent._replace(message=message, largest=bound.largest(message))
