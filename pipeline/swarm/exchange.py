"""What leaves a peer in a round, and what everybody makes of it."""

from typing import NamedTuple

import jax

from pipeline.optim.optimizer import Exchange, Tree
from pipeline.swarm import wire
from pipeline.swarm.commitment import data_hash
from pipeline.swarm.faults import Faults
from pipeline.swarm.rounds import Round


class Sent(NamedTuple):
    """What a peer sent: its bytes, and its commitment to what they hold."""

    payload: bytes
    commitment: bytes


def send(message: Tree, peer: int, round: Round, form: wire.Form, faults: Faults) -> Sent:
    """Puts a peer's message on the wire, true or not: the commitment is to what was sent."""
    message = faults.corrupt(message, peer, round.step)
    return Sent(wire.encode(message, form), commit(message, peer, round))


def commit(message: Tree, peer: int, round: Round) -> bytes:
    """The commitment of a message of a peer in a round."""
    return data_hash(round.step, *round.assignment[peer], wire.fields(message))


def all_gather(axis_name: str = "peer") -> Exchange:
    """The exchange of peers that are rows of a mesh or vmap axis, for `as_transform`."""

    def exchange(message: Tree, step: jax.Array) -> tuple[Tree, Tree]:
        del step
        return message, jax.lax.all_gather(message, axis_name)

    return exchange
