"""Sending and receiving: a message's bytes with the commitment to it."""

from typing import NamedTuple

from pipeline.optim.optimizer import Tree
from pipeline.protocol.round import Round
from pipeline.wire import message as wire
from pipeline.wire.commitment import data_hash


class Sent(NamedTuple):
    """A peer's message as bytes, and its commitment to the message."""

    payload: bytes
    commitment: bytes


class CommitmentError(wire.WireError):
    """The bytes are a message, but not the one that was committed to."""


def send(message: Tree, peer: int, round_: Round, form: wire.Form) -> Sent:
    """Return a peer's message as bytes, with the commitment to it."""
    return Sent(wire.encode(message, form), commit(message, peer, round_))


def commit(message: Tree, peer: int, round_: Round) -> bytes:
    """Return the commitment to a peer's message in a round."""
    return data_hash(round_.step, *round_.assignment[peer], wire.fields(message))


def receive(sent: Sent, peer: int, round_: Round, form: wire.Form) -> Tree:
    """Return the message that a peer sent, checked as every receiver checks it.

    Raises:
      WireError: The bytes are not a message of this run.
      CommitmentError: They are not the message that was committed to.
    """
    message = wire.decode(sent.payload, form)
    check(message, sent.commitment, peer, round_)
    return message


def check(message: Tree, commitment: bytes, peer: int, round_: Round) -> None:
    """Check a decoded message against the commitment to it.

    Raises:
      CommitmentError: The message is not the one that was committed to.
    """
    found = commit(message, peer, round_)
    if found != commitment:
        raise CommitmentError(
            f"payload hashes to {found.hex()[:12]}, expected its commitment {commitment.hex()[:12]}"
        )
