"""The layout of a store: all names in it, which the run and the round fix, and lengths of objects.

    run.json                          what the lab signed of the run
    peers/007/000.json                the key admitted to slot 7; 001.json replaces or ends it
    rounds/00000123/007.payload       the message, zeros after it up to the run's one length
    rounds/00000123/007.record        signed: what the message is of; .join and .leave beside it
    rounds/00000123/007.closed        signed: peer 7's link, which closes the round
    rounds/00000123/007.asked         signed: its link, which begins the round of a run that waited
    rounds/00000123/007.shown         signed: that it put its own state, and the index's SHA-256
    states/00000100/007/index         hashes of the chunks of the state after a round that peer 7
                                      closed; its link has the index's SHA-256
    states/00000100/007/0000          a chunk of it
    own/00000100/007/index            hashes of the chunks of a peer's own state, which was drawn
    own/00000100/007/0000             a chunk of it
    planted.json                      the lab's seal, whose hash is in run.json: put at the end
    collected/0000.json               up to which round the lab removed payloads and states
    addresses/007/00004.sealed        signed: addresses of some rounds, which peer 7 alone can read

An address signs how long its object is. So each thing that a volunteer puts has one length.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

MOST_SLOTS = 256
RUN, ADMISSIONS, COLLECTED, PLANTED = "run.json", "peers/", "collected/", "planted.json"
ROUNDS, STATES, OWN = "rounds/", "states/", "own/"
# Bytes of what is signed, newlines at its end included.
RECORD_BYTES, JOIN_BYTES, LEAVE_BYTES, SHOWN_BYTES = 2048, 4096, 1024, 1024
LINK_BYTES, LINK_BYTES_A_SLOT = 2048, 640
# Beside links.
SIGNED = {"record": RECORD_BYTES, "join": JOIN_BYTES, "leave": LEAVE_BYTES, "shown": SHOWN_BYTES}
KINDS = "payload", *SIGNED, "closed", "asked"  # that a peer puts in a round
OF_A_STATE = re.compile(r"(?:states|own)/([0-9]{8})/[0-9]{3}/(?:[0-9]{4,}|index)")
OF_A_ROUND = re.compile(rf"rounds/([0-9]{{8}})/([0-9]{{3}})\.({'|'.join(KINDS)})")


class RoundObject(NamedTuple):
    """What a name of a round stands for, by the store's layout."""

    step: int
    what: str  #: One of `KINDS`.
    peer: int


def signed_bytes(what: str, slots: int) -> int:
    """Return the length in a store of a kind of `KINDS` that is signed, in a run's slots."""
    return SIGNED[what] if what in SIGNED else LINK_BYTES + LINK_BYTES_A_SLOT * slots


def round_folder(step: int) -> str:
    """Return the prefix of a round's names in the store."""
    return f"{ROUNDS}{step:08}/"


def of_peer(step: int, peer: int, what: str) -> str:
    """Return the name in the store of what a peer puts in a round; `what` is one of `KINDS`."""
    return f"{round_folder(step)}{peer:03}.{what}"


def admission(peer: int, number: int) -> str:
    """Return the name in the store of a statement on who has a slot."""
    return f"{ADMISSIONS}{peer:03}/{number:03}.json"


def state_folder(step: int, peer: int) -> str:
    """Return the prefix in the store of a state's chunks after a round that a peer closed."""
    return f"{STATES}{step:08}/{peer:03}/"


def own_folder(step: int, peer: int) -> str:
    """Return the prefix in the store of the chunks of a peer's own state after a round."""
    return f"{OWN}{step:08}/{peer:03}/"


def step_of(name: str) -> int | None:
    """Return the round after which a state was taken, from its stored name; None for others."""
    match = OF_A_STATE.fullmatch(name)
    return None if match is None else int(match[1])


def collected(number: int) -> str:
    """Return the name in the store of a notice of what the lab removed."""
    return f"{COLLECTED}{number:04}.json"


def addresses(peer: int, number: int) -> str:
    """Return the name in the store of a peer's file of addresses; the first is number 0."""
    return f"addresses/{peer:03}/{number:05}.sealed"


def parse(name: str) -> RoundObject | None:
    """Return the round, peer and kind of an object from its name in the store; None for others.

    Readers ignore every other name.
    """
    match = OF_A_ROUND.fullmatch(name)
    if match is None:
        return None
    step, peer, what = match.groups()
    return RoundObject(int(step), what, int(peer))


def count(is_there: Callable[[int], bool]) -> int:
    """Count how many of the names 0, 1, 2, ... are there. If one is missing, so are all after it.

    It takes about twice as many looks as the number has binary digits.
    """
    step = 1
    while is_there(step - 1):
        step *= 2
    total = step = step // 2
    while step > 1:
        step //= 2
        if is_there(total + step - 1):
            total += step
    return total


def names_by_peer(names: Iterable[str], what: str) -> dict[int, str]:
    """Pick the stored names of one kind, such as "record", from those of a round.

    Returns:
      Peer -> name.
    """
    by_object = {parse(name): name for name in sorted(names)}
    return {key.peer: name for key, name in by_object.items() if key and key.what == what}
