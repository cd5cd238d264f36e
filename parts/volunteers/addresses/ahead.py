"""Addresses that the lab signs ahead, so that a volunteer needs no credentials of the store.

For each peer, and each 16 rounds: one to put each of its own slots, and one to list each round; and
one to list who was admitted; and of rounds with a state those of its chunks. An address holds for 7
days at most. A file of them is signed by the lab, and sealed for the peer's key; its name says how
many there were before it. A file that somebody else put there is passed over.
"""

import logging
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import AsTuple
from lockstep.transcript.windows import Snapshots
from parts.volunteers import chunks, signed, slots
from parts.volunteers.addresses import sealed
from parts.volunteers.bodies import RoundNumber, RunDocument, Seconds, SlotNumber
from parts.volunteers.keys import PrivateKey, PublicKey
from parts.volunteers.signed import Body
from parts.volunteers.store.given import GivenEndpoint
from parts.volunteers.store.s3 import LONGEST, S3Endpoint
from parts.volunteers.store.verbs import AwaitedError, MissedError, Store
from parts.volunteers.store.web_store import StoreRequest, WebStore
from pipeline.net.limits import NetSettings, NotFetchedError, UnreachableError

log = logging.getLogger(__name__)

PAGE = 1000  # names of a page, at most, of every store
SPAN = 16  # rounds of a file, which so has less than 1 MiB with the longest credentials
MOST_BYTES = 2**21  # of a file
MOST_FILES = 10**5  # of a peer
AGAIN = 60  # seconds between two looks for newer addresses, where those at hand have ended
SOON = 7200  # a volunteer warns so many seconds before its last address ends
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
    until: Seconds
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
    own_bytes: int = 0  #: The one length of what a peer owns, as a file.
    snapshots: Snapshots | None = None  #: Of the run, after which it may be drawn for an audit.
    state_bytes: int = 0  #: The one length of what all agree on; 0 if states are not put.

    @classmethod
    def of(cls, peer: int, key: PublicKey, run: str, document: RunDocument) -> "AddressReader":
        """Return a peer's reader, by what the lab signed of a run."""
        last, witness = document.run["config"]["total_steps"], document.run["witness"]
        snapshots = Snapshots(0, last, witness["snapshot_every"], witness["keep_every"])
        sizes = document.slots, document.payload_bytes, document.own_bytes
        return cls(peer, key, run, *sizes, snapshots, document.state_bytes)


def own_puts(reader: AddressReader, step: int) -> Iterator[StoreRequest]:
    """Yield what a peer alone may put in a round, each with its one length."""
    lengths = {
        "payload": reader.payload_bytes,
        "record": slots.RECORD_BYTES,
        "join": slots.JOIN_BYTES,
        "leave": slots.LEAVE_BYTES,
        "closed": slots.link_bytes(reader.slots),
        "asked": slots.link_bytes(reader.slots),
    }
    for what, length in lengths.items():
        yield StoreRequest("PUT", slots.of_peer(step, reader.peer, what), length)
    if reader.snapshots is None:
        return
    if reader.snapshots.keeps(step):
        folder = slots.own_folder(step, reader.peer)
        for name, length in chunks.lengths(folder, reader.own_bytes).items():
            yield StoreRequest("PUT", name, length)
        shown = slots.of_peer(step, reader.peer, "shown")
        yield StoreRequest("PUT", shown, slots.SHOWN_BYTES)
    if reader.state_bytes and step % reader.snapshots.every == 0:
        folder = slots.state_folder(step, reader.peer)
        for name, length in chunks.lengths(folder, reader.state_bytes).items():
            yield StoreRequest("PUT", name, length)


def _lists(slot_count: int, step: int) -> Iterator[StoreRequest]:
    """Yield the requests that list a round, one for each page."""
    per_page = PAGE // len(slots.KINDS)  # peers whose names fill a page
    for peer in range(0, slot_count, per_page):
        after = slots.of_peer(step, peer, "") if peer else ""
        yield StoreRequest("LIST", slots.round_folder(step), after=after)


# ---- The lab ----


def sign_ahead(
    store: Store, readers: Sequence[AddressReader], steps: range, seconds: int, lab: PrivateKey
) -> list[str]:
    """Sign peers' addresses of rounds, and put them into the store; return the files' names.

    Args:
      store: The run's, with the right to sign addresses of it.
      readers: Whose they are, all of one run.
      steps: The rounds.
      seconds: For how long the addresses hold.
      lab: The lab's key.

    Raises:
      LockstepError: no addresses of this store can be signed, or not for so long; or a peer has too
        many files of them.
    """
    if not (isinstance(store, WebStore) and isinstance(store.endpoint, S3Endpoint)):
        raise LockstepError(f"{store.address}: cannot sign addresses, expected s3://BUCKET/FOLDER")
    if not 0 < seconds <= LONGEST:
        raise LockstepError(f"{seconds} s: expected 1 to {LONGEST}, the longest that stores allow")
    sign, until, names = partial(_signed, store.endpoint, seconds), int(time.time()) + seconds, []
    numbers = {r.peer: iter(range(_count(store, r.peer), MOST_FILES)) for r in readers}
    for first in range(steps.start, steps.stop, SPAN):
        rounds = range(first, min(first + SPAN, steps.stop))
        common = sign([ask for step in rounds for ask in _lists(readers[0].slots, step)])
        common |= sign([StoreRequest("LIST", slots.ADMISSIONS)])
        for reader in readers:
            own = sign([ask for step in rounds for ask in own_puts(reader, step)])
            body = _body(reader, first, until, store.endpoint.folder, common | own)
            content = zlib.compress(signed.sign(body, lab))
            for number in numbers[reader.peer]:  # a name may have been taken by somebody else
                name = slots.addresses(reader.peer, number)
                if store.create(name, sealed.seal(content, reader.key, name)):
                    names.append(name)
                    break
            else:
                raise LockstepError(
                    f"{store.address}: peer {reader.peer} has {MOST_FILES} files of addresses, "
                    "expected fewer"
                )
    return names


def _count(store: Store, peer: int) -> int:
    """Return how many files of addresses a peer has."""

    def is_there(number: int) -> bool:
        name = slots.addresses(peer, number)
        return number < MOST_FILES and store.look(name, 0) is not None

    return slots.count(is_there)


def _signed(
    endpoint: S3Endpoint, seconds: int, asks: Sequence[StoreRequest]
) -> dict[StoreRequest, str]:
    return dict(zip(asks, endpoint.sign(asks, seconds), strict=True))


def _body(
    reader: AddressReader, first: int, until: int, folder: str, urls: Mapping[StoreRequest, str]
) -> SignedAddresses:
    return SignedAddresses(
        run=reader.run,
        peer=reader.peer,
        first=first,
        until=until,
        folder=folder,
        puts={ask.name: url for ask, url in urls.items() if ask.verb == "PUT"},
        lists=tuple((ask.name, ask.after, url) for ask, url in urls.items() if ask.verb == "LIST"),
    )


# ---- The volunteer ----


class Addressed(GivenEndpoint):
    """A volunteer's addresses, which are read from the store when they are needed.

    Attributes:
      until: When the last of them end, in seconds since 1970 by the lab's clock; 0 without any.
    """

    def __init__(self, store: WebStore, reader: AddressReader, key: PrivateKey, lab: PublicKey):
        super().__init__(store.address)
        self._store, self._reader, self._key, self._lab = store, reader, key, lab
        self._oldest = self._next = 0  # of the files that were read, and of the newer ones
        self._ends = dict[StoreRequest, int]()
        self._refused = set[StoreRequest]()  # whose address has ended, as the store says too
        self._looked = self._warned = 0.0
        self._lock = threading.Lock()
        self.until = 0

    def find(self, ask: StoreRequest) -> tuple[str, dict[str, str]]:
        """Return the address for this, from whichever file of the lab has it.

        Raises:
          AwaitedError: the lab signed none for the round yet, or it has ended.
          MissedError: it signed addresses of later rounds alone.
          LockstepError: the lab signed none.
        """
        if ask.verb == "GET":
            return super().find(ask)
        with self._lock:  # what an audit asks for is put in a thread of its own
            if not self.has(ask) or self._has_ended(ask):
                self._read_newer()
            while not self.has(ask) and self._oldest > 0:
                self._oldest -= 1
                self._read(self._oldest, newer=False)
            self._warn()
            slot = slots.slot(ask.name)
            if slot is not None and (ask in self._refused or not self.has(ask)):
                error = MissedError if self._newest() > slot.step else AwaitedError
                raise error(self.lacks(ask))
        return super().find(ask)

    def refused(self, ask: StoreRequest) -> bool:
        """Return whether an address that the store refused has ended by this clock too."""
        if self._ends.get(ask, self.until) > time.time():
            return False
        self._refused.add(ask)
        return True

    def _newest(self) -> int:
        """Return the last round that has addresses which hold; 0 without any."""
        now = time.time()
        valid = (slots.slot(ask.name) for ask, ends in self._ends.items() if ends > now)
        return max((slot.step for slot in valid if slot is not None), default=0)

    def _warn(self) -> None:
        """Say once that the last address ends soon."""
        if self._warned < self.until < time.time() + SOON:
            self._warned = self.until
            log.warning(f"train: the lab signed no addresses after {_at(self.until)}")

    def _has_ended(self, ask: StoreRequest) -> bool:
        """Whether it is time to look for a newer address; this clock says only when to try."""
        now = time.time()
        if self._ends.get(ask, self.until) > now or now < self._looked + AGAIN:
            return False
        self._looked = now
        return True

    def _read_newer(self) -> None:
        """Read what the lab signed since; at first the newest file, which a search finds."""
        if not self._next:
            self._oldest = self._next = max(0, _count(self._store, self._reader.peer) - 1)
        before = self._next
        while self._read(self._next, newer=True):
            self._next += 1
        if self._next > before:
            until = f"until {_at(self.until)}, for rounds up to {self._newest()}"
            log.info(f"train: the lab signed addresses {until}")

    def _read(self, number: int, *, newer: bool) -> bool:
        """Take the addresses of a file, if the lab signed them; return whether a file is there."""
        name = slots.addresses(self._reader.peer, number)
        stored = self._store.look(name, MOST_BYTES)
        if stored is None:
            return False
        try:
            self._take(self._opened(name, stored.content), newer=newer)
        except LockstepError as error:
            log.warning(f"train: passes over addresses: {error}")
        return True

    def _opened(self, name: str, data: bytes | None) -> SignedAddresses:
        """Return what the lab signed for this peer.

        Raises:
          LockstepError: the lab did not sign it for this peer and run.
        """
        if data is None:
            raise LockstepError(f"{name}: over {MOST_BYTES} bytes, expected at most that")
        content = _decompress(sealed.unseal(data, self._key, name))
        body = signed.opened(SignedAddresses, content, self._lab, name)
        if (body.run, body.peer) != (self._reader.run, self._reader.peer):
            raise LockstepError(
                f"{name}: is for run {body.run[:12]} and peer {body.peer}, expected run "
                f"{self._reader.run[:12]} and peer {self._reader.peer}"
            )
        home = "/".join([*self._store.address.split("/")[:3], ""])
        urls = *body.puts.values(), *(url for _, _, url in body.lists)
        if not all(url.startswith(home) for url in urls):
            raise LockstepError(f"{name}: has an address of another server, expected {home}")
        return body

    def _take(self, body: SignedAddresses, *, newer: bool) -> None:
        steps = range(body.first, body.first + SPAN)
        asks = {ask.name: ask for step in steps for ask in own_puts(self._reader, step)}
        urls = {asks[name]: url for name, url in body.puts.items() if name in asks}
        urls |= {
            StoreRequest("LIST", prefix, after=after): url for prefix, after, url in body.lists
        }
        urls = {ask: url for ask, url in urls.items() if newer or ask not in self._ends}
        self.give(body.folder, urls)
        self._ends |= dict.fromkeys(urls, body.until)
        self._refused.difference_update(urls)
        self.until = max(self.until, body.until)


def open_addressed(
    address: str, reader: AddressReader, key: PrivateKey, lab: PublicKey, network: NetSettings
) -> WebStore:
    """Return a volunteer's store at a public address: reads are anybody's, the rest is signed."""
    public = WebStore(address, GivenEndpoint(address), network)
    return AddressedStore(address, Addressed(public, reader, key, lab), network)


class AddressedStore(WebStore):
    """A store in which an address that ended is waited for."""

    endpoint: Addressed

    def create(self, name: str, content: bytes) -> bool:
        """Put an object; see `WebStore`."""
        try:
            return super().create(name, content)
        except NotFetchedError as error:
            ask = StoreRequest("PUT", name, len(content))
            if isinstance(error, UnreachableError) or not self.endpoint.refused(ask):
                raise
            self.endpoint.find(ask)  # which waits, unless there is a newer one
            return super().create(name, content)


def _decompress(data: bytes) -> bytes | None:
    """Decompress the bytes of a file of addresses.

    Returns:
      The bytes; None if they are more than a signed body may have; b"" if `data` is not compressed.
    """
    try:
        content = zlib.decompressobj().decompress(data, signed.MOST_BYTES + 1)
    except zlib.error:
        return b""
    return content if len(content) <= signed.MOST_BYTES else None


def _at(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
