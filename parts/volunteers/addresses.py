"""Addresses that the lab signs ahead, so that a volunteer needs no credentials of the store.

For each peer, and each 16 rounds: one to put each of its own slots and each link, and one to list
each round; and one to list who was admitted. An address holds for 7 days at most. The file is
signed by the lab, and sealed for the peer's key.
"""

import time
import zlib
from collections.abc import Iterator
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import AsTuple
from parts.volunteers import sealed, signed, slots
from parts.volunteers.bodies import Int63, RoundNumber, SlotNumber
from parts.volunteers.keys import PrivateKey, PublicKey
from parts.volunteers.signed import Body
from parts.volunteers.store.s3 import LONGEST, S3Endpoint
from parts.volunteers.store.verbs import Store
from parts.volunteers.store.web_store import Ask, WebStore

LINKS = 4  # of each kind in a round: each but the first follows a link that everybody refused
PAGE = 1000  # names of a page, at most, of every store
A_PEER = 4  # names of a round
MOST_BYTES = 2**21  # of a file
UrlText = Annotated[str, Field(max_length=2**13)]
ListingAddress = Annotated[tuple[str, str, UrlText], AsTuple]


class SignedAddresses(Body):
    """What a file of addresses holds."""

    kind: ClassVar[str] = "addresses"
    run: Hash
    """SHA-256 of run.json."""
    peer: SlotNumber
    """Whose slots they are for."""
    first: RoundNumber
    """The first of its rounds."""
    until: Int63
    """When they end, in seconds since 1970 by the lab's clock."""
    folder: str
    """Prefix in the store of the run's names."""
    puts: dict[str, UrlText]
    """Name -> address that puts it."""
    lists: Annotated[tuple[ListingAddress, ...], AsTuple]
    """Prefix, the name after which the listing begins, and its address."""


class AddressReader(NamedTuple):
    """Whose addresses they are, and what of the run they depend on."""

    peer: int  #: The slot.
    key: PublicKey  #: Who has it.
    run: str  #: SHA-256 of run.json.
    slots: int  #: How many the run has.
    payload_bytes: int  #: The one length of a payload.


def _puts(reader: AddressReader, step: int) -> Iterator[Ask]:
    """Yield what a peer may put in a round, each with its one length."""
    lengths = {
        "payload": reader.payload_bytes,
        "record": slots.RECORD_BYTES,
        "join": slots.JOIN_BYTES,
        "leave": slots.LEAVE_BYTES,
    }
    for what, length in lengths.items():
        yield Ask("PUT", slots.of_peer(step, reader.peer, what), length)
    for what in ("closed", "asked"):
        for number in range(LINKS):
            yield Ask("PUT", slots.link(step, what, number), slots.link_bytes(reader.slots))


def _listings(reader: AddressReader, step: int) -> Iterator[Ask]:
    """Yield the listings that have all of a round: an address lists one page."""
    each = (PAGE - 2 * LINKS) // A_PEER  # peers whose names fill a page
    for peer in range(0, reader.slots, each):
        after = slots.of_peer(step, peer, "") if peer else ""
        yield Ask("LIST", slots.round_folder(step), after=after)


# ---- The lab ----


def sign_ahead(
    store: Store,
    reader: AddressReader,
    steps: range,
    seconds: int,
    lab: PrivateKey,
) -> list[str]:
    """Sign a peer's addresses of rounds, and put them into the store; return their names.

    Args:
      store: The run's, with the right to sign addresses of it.
      reader: Whose they are.
      steps: The rounds; those that share a file with them are signed too.
      seconds: For how long the addresses hold.
      lab: The lab's key.

    Raises:
      LockstepError: no addresses of this store can be signed, or not for so long.
    """
    if not (isinstance(store, WebStore) and isinstance(store.endpoint, S3Endpoint)):
        raise LockstepError(f"{store.address}: signs no addresses, expected s3://BUCKET/FOLDER")
    if not 0 < seconds <= LONGEST:
        raise LockstepError(f"{seconds} s: expected at most {LONGEST}, for which stores sign")
    taken, names = store.names(slots.addresses_folder(reader.peer)), []
    for first in range(steps.start - steps.start % slots.SPAN, steps.stop, slots.SPAN):
        number = 0
        while (name := slots.addresses(reader.peer, first, number)) in taken:
            number += 1
        body = _sign(store.endpoint, reader, first, seconds)
        content = zlib.compress(signed.sign(body, lab))
        if not store.create(name, sealed.seal(content, reader.key, name)):
            raise LockstepError(f"{store.address}/{name}: is there, expected no other signer")
        names.append(name)
    return names


def _sign(endpoint: S3Endpoint, reader: AddressReader, first: int, seconds: int) -> SignedAddresses:
    """Sign the addresses of one file."""
    steps = range(first, first + slots.SPAN)
    puts = [ask for step in steps for ask in _puts(reader, step)]
    listings = [ask for step in steps for ask in _listings(reader, step)]
    listings.append(Ask("LIST", slots.ADMISSIONS))
    until = int(time.time()) + seconds
    urls = endpoint.sign([*puts, *listings], seconds)
    return SignedAddresses(
        run=reader.run,
        peer=reader.peer,
        first=first,
        until=until,
        folder=endpoint.folder,
        puts={ask.name: url for ask, url in zip(puts, urls[: len(puts)], strict=True)},
        lists=tuple(
            (ask.name, ask.after, url) for ask, url in zip(listings, urls[len(puts) :], strict=True)
        ),
    )


# ---- The volunteer ----


class Addresses:
    """A volunteer's addresses, which it reads from the store as the rounds go on.

    Attributes:
      until: When the last of them end, in seconds since 1970 by the lab's clock; 0 without any.
    """

    def __init__(self, store: WebStore, reader: AddressReader, key: PrivateKey, lab: PublicKey):
        self._store, self._reader, self._key, self._lab = store, reader, key, lab
        self._seen = dict[int, int]()  # first round of a file -> how many of them were read
        self.until = 0

    def renew(self, step: int) -> bool:
        """Take what the lab signed of a round; return whether there was something new.

        Raises:
          LockstepError: a file was not signed by the lab for this peer.
        """
        first, is_new = step - step % slots.SPAN, False
        while True:
            number = self._seen.get(first, 0)
            name = slots.addresses(self._reader.peer, first, number)
            seen = self._store.look(name, MOST_BYTES)
            if seen is None:
                return is_new
            self._seen[first], is_new = number + 1, True
            self._take(name, first, seen.content)

    def _take(self, name: str, first: int, content: bytes | None) -> None:
        if content is None:
            raise LockstepError(f"{name}: over {MOST_BYTES} bytes, expected at most that")
        body = signed.opened(
            SignedAddresses, _inflated(sealed.unseal(content, self._key, name)), self._lab, name
        )
        expected = self._reader.run, self._reader.peer, first
        if (body.run, body.peer, body.first) != expected:
            raise LockstepError(
                f"{name}: of run {body.run[:12]}, peer {body.peer}, round {body.first}, expected "
                f"{expected[0][:12]}, {expected[1]}, {expected[2]}"
            )
        steps = range(first, first + slots.SPAN)
        asks = {ask.name: ask for step in steps for ask in _puts(self._reader, step)}
        given = {asks[name]: url for name, url in body.puts.items() if name in asks}
        given |= {Ask("LIST", prefix, after=after): url for prefix, after, url in body.lists}
        self._store.endpoint.give(body.folder, given)
        self.until = max(self.until, body.until)


def _inflated(data: bytes) -> bytes | None:
    """Return compressed bytes as they were; None if they are no such, or were too many."""
    try:
        content = zlib.decompressobj().decompress(data, signed.MOST_BYTES + 1)
    except zlib.error:
        return b""
    return content if len(content) <= signed.MOST_BYTES else None
