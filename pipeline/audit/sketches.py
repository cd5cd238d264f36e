"""Messages that are not kept: their roots, and the pieces of them that the transcript has.

Without training, every piece must lead to the root that its sender committed to, and be one that
the round's commitments draw. In a replay, a peer's pieces are compared with those of the message
that it computes (`Pieces.distance`).
"""

from collections.abc import Mapping
from statistics import median

from lockstep.optim.optimizer import Tree
from lockstep.protocol import sketch
from lockstep.protocol.round import Message
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript
from lockstep.wire import exchange
from lockstep.wire import message as wire
from lockstep.wire import sketches as wire_sketches
from pipeline.audit.verdict import Finding
from pipeline.start.begin import Setup

STRAYS = 8  # times the median of the others: beyond it, a distance is its sender's own doing
KIND = "sketch"


class SketchError(Exception):
    """A transcript does not show of a message what it has to."""


def audit_sketches(setup: Setup, transcript: Transcript, entry: Entry, here: bool) -> list[Finding]:
    """Check the roots of a round's messages and, if its payloads are `here`, the sketches."""
    try:
        _check(setup, transcript, entry, here)
    except SketchError as error:  # whoever wrote it held the messages, and cut them
        return [Finding(entry.round.step, None, KIND, str(error), True)]
    return []


def _check(setup: Setup, transcript: Transcript, entry: Entry, here: bool) -> None:
    evidence, form = entry.evidence, setup.programs.form
    rooted = transcript.header.sketched
    if rooted and form.kept:
        raise SketchError("the header has sketches, expected none: messages are kept")
    for messages in (evidence.messages, evidence.others):
        for peer, message in messages.items():
            if (message.root is not None) != rooted:
                has = "no root" if rooted else "a root"
                raise SketchError(f"the message of peer {peer} has {has}, unlike the header says")
            if message.sketch is not None and (not rooted or messages is evidence.others):
                raise SketchError(f"the message of peer {peer} has a sketch, expected none")
            if message.root is not None:
                _check_commitment(entry, peer, message)
    for peer, message in evidence.messages.items() if rooted else ():
        if peer in evidence.broken:
            continue
        if form.kind == wire.DENSE and message.bytes != form.bytes_about:
            text = f"has {message.bytes} bytes, expected {form.bytes_about}"
            raise SketchError(f"the message of peer {peer} {text}")
        if here:
            read(setup, transcript, entry, peer)


def _check_commitment(entry: Entry, peer: int, message: Message) -> None:
    found = exchange.commit_to_root(bytes.fromhex(message.root or ""), peer, entry.round).hex()
    if found != message.commitment:
        text = f"commits to {message.commitment[:12]}, its root gives {found[:12]}"
        raise SketchError(f"peer {peer} {text}")


def read(setup: Setup, transcript: Transcript, entry: Entry, peer: int) -> dict[int, bytes]:
    """Return the drawn pieces of a peer's message, by their number.

    Raises:
      SketchError: They are not kept, or not of the message that the peer committed to.
    """
    message, pieces = entry.evidence.messages[peer], setup.programs.form.pieces
    if message.root is None or message.sketch is None or message.payload is None:
        raise SketchError(f"the message of peer {peer} has no sketch, expected some of its pieces")
    drawn = draw(setup, entry, peer)
    if message.sketch != (size := wire_sketches.size_of(pieces, drawn)):
        raise SketchError(f"peer {peer}: a sketch of {message.sketch} bytes, expected {size}")
    try:
        root = bytes.fromhex(message.root)
        return wire_sketches.read(pieces, transcript.payload(message), drawn, root)
    except ValueError as error:
        raise SketchError(f"peer {peer}: {error}") from error


def draw(setup: Setup, entry: Entry, peer: int) -> list[int]:
    """Return which pieces of a peer's message the transcript must have."""
    pieces, seed = setup.programs.form.pieces, setup.settings.seed
    known = entry.evidence.commitments
    return sketch.drawn(seed, entry.round.step, known, peer, pieces.count, pieces.drawn)


def distances(
    setup: Setup, transcript: Transcript, entry: Entry, replayed: Mapping[int, Tree]
) -> dict[int, float]:
    """Return the distance of each replayed peer's pieces, but of broken messages, by peer.

    A piece that is not what the audit found it to be is at an infinite distance.
    """
    found, pieces = {}, setup.programs.form.pieces
    for peer, message in replayed.items():
        if peer in entry.evidence.broken:
            continue
        try:
            sent = read(setup, transcript, entry, peer)
        except SketchError:
            found[peer] = float("inf")
            continue
        found[peer] = pieces.distance(wire.fields(message), sent)
    return found


def to_blame(distances: Mapping[int, float], limit: float) -> tuple[dict[int, float], list[int]]:
    """Return the peers beyond the limit: those who are to blame, and those who may not be.

    A replay computes with the params that follow from its own messages. Where a lie is in pieces
    that were not drawn, all later messages of the window differ from it, of honest peers too. So a
    peer is named where its distance is beyond the limit, and beyond `STRAYS` times the median of
    the other peers' distances.

    Args:
      distances: By peer, of a round's messages.
      limit: Largest distance that is accepted.
    """
    named, astray = {}, []
    for peer, distance in distances.items():
        if distance <= limit:
            continue
        others = [other for p, other in distances.items() if p != peer]
        if others and not distance > STRAYS * median(others):
            astray.append(peer)
        else:
            named[peer] = distance
    return named, astray
