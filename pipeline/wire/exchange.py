"""Sending and receiving: a message's bytes with the commitment to it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.optim.optimizer import Tree
from pipeline.protocol.round import Round
from pipeline.wire import message as wire
from pipeline.wire import spool
from pipeline.wire.commitment import data_hash
from pipeline.wire.spool import Buffer


class Sent(NamedTuple):
    """A peer's message as bytes, and its commitment to the message."""

    payload: Buffer
    commitment: bytes


class CommitmentError(wire.WireError):
    """The bytes are a message, but not the one that was committed to."""


def send(message: Tree, peer: int, round_: Round, form: wire.Form) -> Sent:
    """Return a peer's message as bytes, with the commitment to it."""
    return Sent(wire.encode(message, form), commit(message, peer, round_))


def send_spooled(
    leaves: list[np.ndarray], peer: int, round_: Round, form: wire.Form, folder: Path | None
) -> Sent:
    """Return a dense message, which is emptied array by array, as bytes on disk.

    The bytes are those of `send`. At no time is more than one array there twice.

    Args:
      leaves: The arrays of the message; the list is empty afterwards.
      peer: Who sends it.
      round_: In which round.
      form: The form of the run's messages, of kind DENSE.
      folder: See `spool.hold`.
    """
    commitment = []

    def write(take: Callable[[Buffer], Any]) -> None:
        take(form.header)

        def fields() -> Iterator[Buffer]:
            while leaves:
                for field in wire.fields(leaves.pop(0)):
                    take(field)
                    yield field

        commitment.append(data_hash(round_.step, *round_.assignment[peer], fields()))

    return Sent(spool.hold(folder, write), commitment[0])


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
