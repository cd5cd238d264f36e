"""Addresses that the lab signs ahead, so that a volunteer needs no credentials of the store.

For each peer, and each 16 rounds: one to put each of its own slots, and one to list each round; and
one to list who was admitted; and of rounds with a state those of its chunks. An address holds for 7
days at most. A file of them is sealed for the peer's key, and signed by the lab; its name says how
many there were before it. What somebody else put there is as if it was not there.
"""

import logging
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, ClassVar, NamedTuple
from urllib.parse import quote

from cryptography.exceptions import InvalidSignature
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import AsTuple
from lockstep.transcript.windows import Snapshots
from parts.volunteers import layout, signed
from parts.volunteers.bodies import RoundNumber, RunDocument, Seconds, SlotNumber
from parts.volunteers.keys import PrivateKey, PublicKey
from parts.volunteers.signed import Body
from parts.volunteers.store import chunks, sealed
from parts.volunteers.store.verbs import AwaitedError, MissedError, Store
from parts.volunteers.store.web_store import StoreRequest, WebStore
from pipeline.net.limits import NetSettings, NotFetchedError, UnreachableError

log = logging.getLogger(__name__)

PAGE = 1000  # names of a page, at most, of every store
SPAN = 16  # rounds of a file, which so has less than 1 MiB with the longest credentials
MOST_BYTES = 2**21  # of a file
MOST_FILES = 10**5  # of a peer
SIGNATURE_BYTES = 64
AGAIN = 60  # seconds between two looks for newer addresses, where those at hand have ended
SOON = 7200  # a volunteer warns so many seconds before its last address ends
UrlText = Annotated[str, Field(max_length=2**13)]
ListingAddress = Annotated[tuple[str, str, UrlText], AsTuple]


class SignedAddresses(Body):
    """What a file of signed addresses holds."""

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
    """Whose signed addresses they are, and in which run."""

    peer: int  #: The slot.
    key: PublicKey  #: Who has it.
    run: str  #: SHA-256 of run.json.
    document: RunDocument  #: What the lab signed of the run.

    @property
    def snapshots(self) -> Snapshots:
        """After which rounds the addresses' peer may be drawn for an audit, and puts states."""
        last, witness = self.document.run["config"]["total_steps"], self.document.run["witness"]
        return Snapshots(0, last, witness["snapshot_every"], witness["keep_every"])


def own_puts(reader: AddressReader, step: int) -> Iterator[StoreRequest]:
    """Yield what a peer's addresses let it alone put in a round, each with its one length."""
    document, snapshots = reader.document, reader.snapshots
    payload = layout.of_peer(step, reader.peer, "payload")
    yield StoreRequest("PUT", payload, document.payload_bytes)
    for what in ("record", "join", "leave", "closed", "asked"):
        length = layout.signed_bytes(what, document.slots)
        yield StoreRequest("PUT", layout.of_peer(step, reader.peer, what), length)
    if snapshots.keeps(step):
        folder = layout.own_folder(step, reader.peer)
        for name, length in chunks.lengths(folder, document.own_bytes).items():
            yield StoreRequest("PUT", name, length)
        shown = layout.of_peer(step, reader.peer, "shown")
        yield StoreRequest("PUT", shown, layout.SHOWN_BYTES)
    if document.state_bytes and step % snapshots.every == 0:
        folder = layout.state_folder(step, reader.peer)
        for name, length in chunks.lengths(folder, document.state_bytes).items():
            yield StoreRequest("PUT", name, length)


def lists(slot_count: int, step: int) -> Iterator[StoreRequest]:
    """Yield the requests for which addresses list a round, one for each page."""
    per_page = PAGE // len(layout.KINDS)  # peers whose names fill a page
    for peer in range(0, slot_count, per_page):
        after = layout.of_peer(step, peer, "") if peer else ""
        yield StoreRequest("LIST", layout.round_folder(step), after=after)


def sign_file(content: bytes, lab: PrivateKey, run: Hash, name: str) -> bytes:
    """Return a sealed file of addresses with the lab's signature before it."""
    return lab.sign(_signed_bytes(content, run, name)) + content


def sealed_in(data: bytes | None, lab: PublicKey, run: Hash, name: str) -> bytes | None:
    """Return the sealed addresses in a file; None if it is not the lab's for this name."""
    if data is None:
        return None
    signature, content = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
    try:
        lab.verify(signature, _signed_bytes(content, run, name))
    except InvalidSignature:
        return None
    return content


def _signed_bytes(content: bytes, run: Hash, name: str) -> bytes:
    return b"lockstep/addresses file/1\0%s\0%s\0%s" % (run.encode(), name.encode(), content)


def count_files(store: Store, reader: AddressReader, lab: PublicKey) -> int:
    """Return how many files of addresses the lab has put for a peer, one after the other.

    Files of others can only come after these. So what they put costs a few looks more.
    """

    def is_there(number: int) -> bool:
        name = layout.addresses(reader.peer, number)
        return number < MOST_FILES and store.look(name, 0) is not None

    def is_signed(number: int) -> bool:
        stored = store.look(name := layout.addresses(reader.peer, number), MOST_BYTES)
        return stored is not None and sealed_in(stored.content, lab, reader.run, name) is not None

    count = layout.count(is_there)
    return count if not count or is_signed(count - 1) else layout.count(is_signed)


class PublicEndpoint:
    """A public address to read from, and those that the store's owner signed to put and list."""

    hides = True  # AWS answers 403 for a missing object to a client that may not list

    def __init__(self, address: str):
        self.folder = ""  # of the names in listings
        self._address, self._puts = address, dict[StoreRequest, str]()
        self._lists = dict[str, dict[str, str]]()  # prefix -> after -> address

    def give(self, folder: str, urls: Mapping[StoreRequest, str]) -> None:
        """Take signed addresses, in place of others for the same."""
        self.folder = folder
        for ask, url in urls.items():
            if ask.verb == "LIST":
                self._lists.setdefault(ask.name, {})[ask.after] = url
            else:
                self._puts[ask] = url

    def find(self, ask: StoreRequest) -> str:
        """Return the public address for this, or the signed one."""
        if ask.verb == "GET":
            return f"{self._address}/{quote(ask.name)}"
        if (url := self.signed_url(ask)) is None:
            raise LockstepError(self.lacks(ask))
        return url

    def lacks(self, ask: StoreRequest) -> str:
        """Say that there is no signed address for this."""
        what = f"{ask.size} bytes" if ask.verb == "PUT" else ask.verb
        where = f"{self._address}/{ask.name}"
        return f"{where}: found no address for {what}, expected one that the lab signed"

    def signed_url(self, ask: StoreRequest) -> str | None:
        """Return the signed address for this; of a listing that of the page that has `after`."""
        if ask.verb != "LIST":
            return self._puts.get(ask)
        pages = self._lists.get(ask.name, {})
        starts = [after for after in pages if after <= ask.after]
        return pages[max(starts)] if starts else None


class AddressedEndpoint(PublicEndpoint):
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

    def find(self, ask: StoreRequest) -> str:
        """Return the signed address for this, from whichever file of the lab has it.

        Raises:
          AwaitedError: the lab signed none for the round yet, or it has ended.
          MissedError: it signed addresses of later rounds alone.
          LockstepError: the lab signed none.
        """
        if ask.verb == "GET":
            return super().find(ask)
        with self._lock:  # what an audit asks for is put in a thread of its own
            if not self.signed_url(ask) or self._has_ended(ask):
                self._read_newer()
            while not self.signed_url(ask) and self._oldest > 0:
                self._oldest -= 1
                self._read(self._oldest, newer=False)
            self._warn()
            slot = layout.parse(ask.name)
            if slot is not None and (ask in self._refused or not self.signed_url(ask)):
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
        """Return the last round that has signed addresses which hold; 0 without any."""
        now = time.time()
        valid = (layout.parse(ask.name) for ask, ends in self._ends.items() if ends > now)
        return max((slot.step for slot in valid if slot is not None), default=0)

    def _warn(self) -> None:
        """Say once that the last signed address ends soon."""
        if self._warned < self.until < time.time() + SOON:
            self._warned = self.until
            log.warning(f"train: the lab signed no addresses after {_at(self.until)}")

    def _has_ended(self, ask: StoreRequest) -> bool:
        """Whether it is time to look for newer addresses; this clock says only when to try."""
        now = time.time()
        if self._ends.get(ask, self.until) > now or now < self._looked + AGAIN:
            return False
        self._looked = now
        return True

    def _read_newer(self) -> None:
        """Read the addresses that the lab signed since; at first the newest file, by a search."""
        if not self._next:
            self._oldest = self._next = max(
                0, count_files(self._store, self._reader, self._lab) - 1
            )
        before = self._next
        while self._read(self._next, newer=True):
            self._next += 1
        if self._next > before:
            until = f"until {_at(self.until)}, for rounds up to {self._newest()}"
            log.info(f"train: the lab signed addresses {until}")

    def _read(self, number: int, *, newer: bool) -> bool:
        """Take the addresses of a file; return whether the lab has put one there."""
        name = layout.addresses(self._reader.peer, number)
        stored = self._store.look(name, MOST_BYTES)
        data = stored and sealed_in(stored.content, self._lab, self._reader.run, name)
        if data is None:
            return False
        try:
            self._take(self._opened(name, data), newer=newer)
        except LockstepError as error:
            log.warning(f"train: passes over addresses: {error}")
        return True

    def _opened(self, name: str, data: bytes) -> SignedAddresses:
        """Return the addresses that the lab sealed for this peer.

        Raises:
          LockstepError: the lab did not sign it for this peer and run.
        """
        compressed = sealed.unseal(data, self._key, name)
        try:
            content = zlib.decompressobj().decompress(compressed, signed.MOST_BYTES + 1)
        except zlib.error:
            content = b""  # which nobody signed
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
    public = WebStore(address, PublicEndpoint(address), network)
    return AddressedStore(address, AddressedEndpoint(public, reader, key, lab), network)


class AddressedStore(WebStore):
    """A store in which an address that ended is waited for."""

    endpoint: AddressedEndpoint

    def create(self, name: str, content: bytes) -> bool:
        """Put an object by a signed address; see `WebStore`."""
        try:
            return super().create(name, content)
        except NotFetchedError as error:
            ask = StoreRequest("PUT", name, len(content))
            if isinstance(error, UnreachableError) or not self.endpoint.refused(ask):
                raise
            self.endpoint.find(ask)  # which waits, unless there is a newer one
            return super().create(name, content)


def _at(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
