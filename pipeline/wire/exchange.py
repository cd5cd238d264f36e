"""What leaves a peer in a round, and what becomes of it on the way."""

from typing import NamedTuple

import jax

from pipeline.optim.optimizer import Exchange, Tree
from pipeline.protocol.round import Round
from pipeline.wire import message as wire
from pipeline.wire.commitment import data_hash


class Sent(NamedTuple):
    """What a peer sent: its bytes, and its commitment to what they hold."""

    payload: bytes
    commitment: bytes


class CommitmentError(wire.WireError):
    """Bytes that are a message, and not the one that was committed to."""


def send(message: Tree, peer: int, round_: Round, form: wire.Form) -> Sent:
    """Puts a peer's message on the wire, with the commitment to it."""
    return Sent(wire.encode(message, form), commit(message, peer, round_))


def commit(message: Tree, peer: int, round_: Round) -> bytes:
    """The commitment of a message of a peer in a round."""
    return data_hash(round_.step, *round_.assignment[peer], wire.fields(message))


def receive(sent: Sent, peer: int, round_: Round, form: wire.Form) -> Tree:
    """The message that a peer sent, as every receiver checks it.

    Raises:
      WireError: the bytes are no message of this run.
      CommitmentError: they are not what was committed to.
    """
    message = wire.decode(sent.payload, form)
    check(message, sent.commitment, peer, round_)
    return message


def check(message: Tree, commitment: bytes, peer: int, round_: Round) -> None:
    """Raises: CommitmentError: the message is not the one that was committed to."""
    found = commit(message, peer, round_)
    if found != commitment:
        raise CommitmentError(
            f"payload hashes to {found.hex()[:12]}, expected its commitment {commitment.hex()[:12]}"
        )


def all_gather(axis_name: str = "peer") -> Exchange:
    """The exchange of peers that are rows of a mesh or vmap axis, for `as_transform`."""

    def exchange(message: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        del step
        return message, jax.lax.all_gather(message, axis_name)

    return exchange
